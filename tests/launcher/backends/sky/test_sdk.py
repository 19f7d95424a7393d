"""SkyPilot's SDK, as the tests have it, against a server that answers late, badly or never."""

import asyncio
import json
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from flotilla_launcher.backends.ports import (
    BackendError,
    BackendUnreachable,
    CapacityError,
    SetupError,
    StartLostError,
)
from flotilla_launcher.backends.sky import names, pending_requests
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.state import ROLLOUT
from tests.support.skypilot.in_process import sdk_at

_LIMIT_S = 0.3
_ANSWERS: dict[str, Any] = {
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
def server() -> Generator[Server]:
    server = Server()
    listening = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{listening.server_port}"
    with sdk_at(address):
        yield server
    server.released.set()
    listening.shutdown()
    listening.server_close()


@pytest.fixture
def client(server: Server) -> SkyClient:
    return SkyClient(quick_s=_LIMIT_S, slow_s=_LIMIT_S)


async def test_a_table_that_is_never_sent_is_unreachable_and_queried_again(
    server: Server, client: SkyClient
) -> None:
    server.hung["sky.status"] = "get"
    for look in await asyncio.gather(
        client.list_clusters(), client.list_clusters(), return_exceptions=True
    ):
        assert isinstance(look, BackendUnreachable)
        assert "has not answered for 0.3 s; the launcher retries" in str(look)
    server.hung.clear()
    assert await client.list_clusters() == []


@pytest.mark.parametrize("method", ["sky.job_status", "sky.down", "sky.status"])
async def test_no_question_is_waited_for_for_ever(
    server: Server, client: SkyClient, method: str
) -> None:
    server.hung[method] = "get"
    query = {
        "sky.job_status": lambda: client.get_job_status(_NAME),
        "sky.down": lambda: client.tear_down_cluster(_NAME),
        "sky.status": lambda: client.list_clusters(certain=[_NAME]),
    }[method]
    with pytest.raises(BackendUnreachable, match="has not answered"):
        await asyncio.wait_for(query(), 10.0)


async def test_a_look_at_clusters_that_hangs_keeps_no_other_from_looking(
    server: Server, client: SkyClient
) -> None:
    server.hung["sky.status"] = "submit"
    with pytest.raises(BackendUnreachable, match="has not answered"):
        await client.list_clusters()
    server.hung.clear()
    assert await client.list_clusters() == []


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
