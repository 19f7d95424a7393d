"""A cloud's own list against SkyPilot's table: machines that only the cloud knows are ended."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.config import canonical_json
from flotilla_launcher.backends.ports import BackendUnreachable
from flotilla_launcher.backends.sky import names
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.state import LEARNER, ROLLOUT
from tests.support import sky_launches
from tests.support.skypilot.server import Server


class Account:
    """A cloud with machines by their ids, which anybody with the key may end."""

    def __init__(self) -> None:
        self.machines: dict[str, str] = {}
        self.broken = False

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.broken:
            return 500, {}
        if path.endswith("/instance-operations/terminate"):
            for identity in body["instance_ids"]:
                del self.machines[identity]
        listed = [{"id": i, "name": n, "status": "active"} for i, n in self.machines.items()]
        return 200, {"data": [*listed, {"id": "9", "name": None, "status": "terminating"}]}


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Account]:
    account = Account()

    class AccountHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
            known = self.headers["authorization"] == "Bearer the-key"
            status, answer = account.answer(self.path, body) if known else (401, {})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), AccountHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    home = tmp_path / "home"
    (home / ".lambda_cloud").mkdir(parents=True)
    (home / ".lambda_cloud/lambda_keys").write_text("api_key = the-key\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FLOTILLA_LAMBDA_URL", f"http://127.0.0.1:{server.server_port}/api/v1")
    yield account
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of a launcher with one run, whose machines may be at Lambda."""
    folder = tmp_path / "runs" / sky_launches.RUN_ID
    folder.mkdir(parents=True)
    policy = {"model": "none", "max_model_len": 8}
    launcher = {"backend": "sky", "sky": sky_launches.MACHINES}
    spec = {"name": "tiny", "seed": 0, "policy": policy, "launcher": launcher}
    (folder / "spec.json").write_text(canonical_json(spec))
    return folder.parent


def on_cloud(runs: Path, run_id: str, service: str) -> str:
    """SkyPilot's name for a machine of a cluster: it ends with the user's mark and a number."""
    member = names.member_name(names.owner_of(runs), run_id, (service, 0))
    return f"{member}-7-89abcdef-head"


@pytest.fixture
def audited(account: Account, client: SkyClient, runs: Path, root: Path) -> SkyBackend:
    return SkyBackend(runs, root, client, poll_s=0.02)


async def test_a_machine_that_skypilot_has_forgotten_is_named_and_then_ended_at_its_cloud(
    account: Account, audited: SkyBackend, sky: Server, runs: Path, tmp_path: Path
) -> None:
    backend = audited
    known = on_cloud(runs, "other", LEARNER)
    sky.leak(known.removesuffix("-89abcdef-head"))
    account.machines = {
        "1": on_cloud(runs, "lost", ROLLOUT),
        "2": on_cloud(runs, sky_launches.RUN_ID, ROLLOUT),
        "3": on_cloud(tmp_path / "stranger", "lost", ROLLOUT),
        "4": "stranger",
        "5": known,
    }
    active = [sky_launches.RUN_ID, "other"]
    (orphan,) = await backend.list_orphan_resources(active)
    assert (orphan.name, orphan.detail) == (f"machine 1 {account.machines['1']}", "at lambda")
    assert len(account.machines) == 5
    (message,) = await backend.reap_orphans(active)
    assert message.startswith("machine 1 ") and "SkyPilot had forgotten it" in message
    assert sorted(account.machines) == ["2", "3", "4", "5"]
    assert await backend.reap_orphans(active) == []


async def test_a_run_is_clean_when_its_clouds_show_nothing_of_it_either(
    account: Account, audited: SkyBackend, runs: Path
) -> None:
    backend = audited
    account.machines = {
        "1": on_cloud(runs, sky_launches.RUN_ID, LEARNER),
        "2": on_cloud(runs, "other", LEARNER),
    }
    evidence = await backend.clean_run(sky_launches.RUN_ID)
    assert not evidence.gone and "machine 1 " in evidence.detail
    assert (await backend.clean_run(sky_launches.RUN_ID)).gone
    assert list(account.machines) == ["2"]


async def test_an_unreachable_cloud_is_no_empty_cloud(
    account: Account, audited: SkyBackend
) -> None:
    backend = audited
    account.broken = True
    for query in (
        backend.list_orphan_resources([]),
        backend.reap_orphans([]),
        backend.clean_run(sky_launches.RUN_ID),
    ):
        with pytest.raises(BackendUnreachable, match="lambda itself does not answer"):
            await query


async def test_a_cloud_where_no_run_may_be_is_not_queried(
    account: Account, audited: SkyBackend, runs: Path
) -> None:
    backend = audited
    account.broken = True
    file = runs / sky_launches.RUN_ID / "spec.json"
    file.write_text(file.read_text().replace("lambda", "aws"))
    assert await backend.list_orphan_resources([]) == []
    file.write_text("of another version")
    with pytest.raises(BackendUnreachable):
        await backend.list_orphan_resources([])
