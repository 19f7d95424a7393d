"""SkyPilot's SDK, as the tests have it, against a server that answers late, badly or never."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from services.launcher.backends.ports import (
    BackendError,
    BackendUnreachable,
    CapacityError,
    SetupError,
    StartLostError,
)
from services.launcher.backends.sky import names, pending_requests
from services.launcher.backends.sky.job_queue import JobQueue
from services.launcher.backends.sky.sdk import SkyClient
from services.launcher.state import ROLLOUT
from tests.support.repository import ROOT

_SDK = ROOT / "tests/faults/sky_kills/sdk"
_LIMIT_S = 0.3
_ANSWERS: dict[str, Any] = {
    "sky.jobs.queue": {"kind": "jobs", "value": []},
    "sky.status": {"kind": "clusters", "value": []},
    "sky.api_cancel": {"kind": "", "value": []},
}
_NAME = names.member_name("owner", "run", (ROLLOUT, 0))
_TASK = {"name": _NAME, "secrets": {}}


class Server:
    """`hung` are methods that are never answered, at `submit` or at `get`."""

    def __init__(self) -> None:
        self.hung: dict[str, str] = {}
        self.error = ""
        self.status = 200
        self.released = threading.Event()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        method = str(body.get("method") or body.get("request"))
        if self.hung.get(method) == path:
            self.released.wait()
        match path:
            case "submit":
                return 200, {"request": method}
            case "status":
                return 200, {"requests": []}
            case "get" if self.error:
                return self.status, {"error": {"type": self.error, "text": "it broke"}}
            case _:
                return 200, _ANSWERS.get(method, {})


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class AnswersHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = server.answer(self.path.strip("/"), body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    return AnswersHandler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Generator[Server]:
    server = Server()
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{listening.server_port}"
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", address)
    yield server
    server.released.set()
    listening.shutdown()
    listening.server_close()


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Generator[SkyClient]:
    for name in ("SKYPILOT_DISABLE_LOCAL_API_SERVER", "SKYPILOT_DISABLE_USAGE_COLLECTION"):
        monkeypatch.setenv(name, "1")
    before = {name: sys.modules.pop(name) for name in _skys()}
    monkeypatch.syspath_prepend(str(_SDK))
    yield SkyClient(quick_s=_LIMIT_S, slow_s=_LIMIT_S)
    for name in _skys():
        del sys.modules[name]
    sys.modules.update(before)


def _skys() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "sky"]


async def test_a_queue_that_is_never_sent_is_unreachable_and_queried_again(
    server: Server, client: SkyClient
) -> None:
    board = JobQueue(client, poll_s=0.0)
    server.hung["sky.jobs.queue"] = "get"
    for look in await asyncio.gather(
        board.recent_jobs(), board.fresh_jobs(), return_exceptions=True
    ):
        assert isinstance(look, BackendUnreachable)
        assert "has not answered for 0.3 s; the launcher retries" in str(look)
    server.hung.clear()
    assert await board.recent_jobs() == []


@pytest.mark.parametrize("method", ["sky.job_status", "sky.down", "sky.jobs.cancel", "sky.status"])
async def test_no_question_is_waited_for_for_ever(
    server: Server, client: SkyClient, method: str
) -> None:
    server.hung[method] = "get"
    query = {
        "sky.job_status": lambda: client.get_job_status(_NAME),
        "sky.down": lambda: client.tear_down_cluster(_NAME),
        "sky.jobs.cancel": lambda: client.cancel_jobs([1]),
        "sky.status": lambda: client.list_clusters(certain=[_NAME]),
    }[method]
    with pytest.raises(BackendUnreachable, match="has not answered"):
        await asyncio.wait_for(query(), 10.0)


async def test_a_look_at_clusters_that_hangs_keeps_no_other_from_looking(
    server: Server, client: SkyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYPILOT_DEBUG", raising=False)
    server.hung["sky.status"] = "submit"
    with pytest.raises(BackendUnreachable, match="has not answered"):
        await client.list_clusters()
    server.hung.clear()
    assert await client.list_clusters() == []
    server.released.set()
    async with asyncio.timeout(5.0):
        while "SKYPILOT_DEBUG" in os.environ:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_submission_that_never_arrives_is_not_under_way_for_ever(
    server: Server, client: SkyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hung["sky.launch"] = "submit"
    launching = asyncio.create_task(client.launch_cluster(_TASK, {}))
    while not await client.is_start_pending(_NAME):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    launching.cancel()
    assert await client.is_start_pending(_NAME)
    monkeypatch.setattr(pending_requests, "_HANDOVER_S", 0.0)
    assert not await client.is_start_pending(_NAME)
    assert not await client.cancel_pending(lambda name: name == _NAME)


@pytest.mark.parametrize(
    ("kind", "meaning"),
    [
        ("RequestInterruptedError", BackendUnreachable),
        ("FetchClusterInfoError", StartLostError),
        ("ClusterStatusFetchingError", StartLostError),
        ("SkyletInternalError", StartLostError),
        ("SkyletUnavailableError", StartLostError),
        ("NetworkError", StartLostError),
        # SkyPilot wraps errors that it does not know, such as a locked database.
        ("sqlalchemy.exc.OperationalError", StartLostError),
        ("NewsOfTomorrowError", StartLostError),
        ("TypeError", StartLostError),
        ("RequestCancelled", StartLostError),
        ("ResourcesUnavailableError", CapacityError),
        ("OSError", CapacityError),
        ("RuntimeError", SetupError),
        ("CommandFailureException", SetupError),
        ("ValueError", BackendError),
    ],
)
async def test_what_passes_by_itself_is_no_wrong_wish(
    server: Server, client: SkyClient, kind: str, meaning: type[Exception]
) -> None:
    server.error = kind
    with pytest.raises((BackendError, BackendUnreachable)) as caught:
        await client.launch_cluster(_TASK, {})
    assert type(caught.value) is meaning


async def test_a_server_that_takes_no_requests_at_present_is_tried_again(
    server: Server, client: SkyClient
) -> None:
    server.error, server.status = "unavailable", 503
    with pytest.raises(BackendUnreachable, match="the launcher retries"):
        await client.launch_cluster(_TASK, {})


async def test_a_version_of_skypilot_that_lacks_some_errors_will_do(
    server: Server, client: SkyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RequestInterruptedError", "SkyletUnavailableError", "CloudError"):
        monkeypatch.delattr(sys.modules["sky.exceptions"], name)
    server.error = "ValueError"
    with pytest.raises(BackendError, match="ValueError: it broke"):
        await client.launch_cluster(_TASK, {})
