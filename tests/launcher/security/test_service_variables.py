"""A real launcher and the processes that it starts, with a canary for every secret there is."""

import asyncio
import json
import os
import re
import stat
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.rpc import rpc
from flotilla_common.rpc.tls import TLS_VARIABLE
from flotilla_launcher.backends.local.marked_processes import MARK_VARIABLE
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.security import service_variables
from flotilla_launcher.security.service_variables import LAUNCHERS_OWN
from tests.support.canary import HOOK, KEPT, REMOTE_OPTIONS, Canaries
from tests.support.doctor import double
from tests.support.launcher import ENDED, forged_fakes, left_running, spec
from tests.support.launcher_process import address_of
from tests.support.repository import ROOT
from tests.support.waiting import until_seen, wait_until

SECRET = re.compile(r"secrets\.(\w+)")
# docs/launching.md lists these for each service of such a spec, and no others: its part names
# the one, and the policy is a hub model.
NAMED = {"env_gateway": "FLEET_API_KEY", "learner": REMOTE_OPTIONS, "rollout": "NEBIUS_TENANT_ID"}
GIVEN = {
    "env_gateway": {NAMED["env_gateway"]},
    "learner": {NAMED["learner"], "HF_TOKEN"},
    "rollout": {NAMED["rollout"], "HF_TOKEN"},
}


@dataclass
class Here:
    """A running launcher with its folder, and its clients."""

    runs: Path
    canaries: Canaries
    stub: Any
    repeater: str
    launcher: psutil.Process

    def wish(self, *, skip: tuple[str, ...] = (), **sections: Any) -> str:
        slack = {"channel": "C1", "api_url": f"{self.repeater}/api"}
        notify = {"slack": slack, "webhook_env": HOOK}
        settings = {"notify": notify, "skip_probes": skip, **sections.pop("launcher", {})}
        return json.dumps(spec(launcher=settings, **sections))

    async def start(self, wish: str) -> str:
        request = pb.StartRunRequest(request_id=f"{time.monotonic_ns()}", spec_json=wish)
        return (await self.stub.StartRun(request, timeout=60.0)).run_id

    async def until(self, run_id: str, reached: Callable[[pb.Run], bool]) -> pb.Run:
        async def get() -> pb.Run:
            return (await self.stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=5.0)).run

        return await until_seen(get, reached)

    async def answers(self, run_id: str) -> bytes:
        """All answers of RunService about a run."""
        get, lists = pb.GetRunRequest(run_id=run_id), pb.ListRunsRequest()
        text = [await self.stub.GetRun(get), await self.stub.ListRuns(lists)]
        tail = pb.TailLogsRequest(run_id=run_id, lines=1_000_000)
        text += [line async for line in self.stub.TailLogs(tail)]
        text += [event async for event in self.stub.WatchRun(pb.WatchRunRequest(run_id=run_id))]
        return b"".join(each.SerializeToString() for each in text)


def repeat(path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[int, Any]:
    """The worst of servers: it refuses, and repeats the request in its answer."""
    reported = f"no user is known by {headers.get('authorization')} at {path}"
    return (403 if "/hooks/" in path else 200), {"ok": False, "error": reported, "body": body}


@asynccontextmanager
async def launcher(folder: Path) -> AsyncGenerator[Here]:
    """A launcher that is a process of its own; what it starts stands in for forks of a forge, with
    the environment that the launcher gives it."""
    canaries, runs = Canaries(), folder / "runs"
    runs.mkdir()
    (folder / "tmp").mkdir()
    with double(repeat) as repeater, (folder / "stderr").open("wb") as output:
        environ = {**os.environ, **forged_fakes(), **canaries.environ(repeater)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flotilla_launcher", "--runs", str(runs)),
            cwd=ROOT,
            env={**environ, "TMPDIR": str(folder / "tmp")},
            stdout=output,
            stderr=output,
        )
        try:
            at = await address_of(runs, process, folder / "stderr")
            async with rpc.channel(at.address, token=at.token) as channel:
                stub = RunServiceStub(channel)
                yield Here(runs, canaries, stub, repeater, psutil.Process(process.pid))
        finally:
            process.terminate()
            await process.wait()


async def test_a_run_leaves_no_secret_anywhere_while_it_lasts_and_afterwards(
    tmp_path: Path,
) -> None:
    async with launcher(tmp_path) as here:
        crash = {"crash": "once", "repeats": list(here.canaries.values)}
        parts: dict[str, dict[str, Any]] = {
            service: {**crash, "message": f"${name}"} for service, name in NAMED.items()
        }
        parts["learner"]["steps"] = 100_000
        wish = here.wish(skip=("slack", "webhook"), **parts)
        run_id = await here.start(wish)
        here.canaries.add_minted(here.runs, run_id)
        restarted = await here.until(run_id, _all_restarted)
        assert "401 Unauthorized" in (here.runs / run_id / "logs/learner-0.log").read_text()
        _check_processes(here, restarted)
        _check_places(here, tmp_path)
        # The notification of the start failed.
        await asyncio.to_thread(_until_logged, tmp_path / "stderr", "messages wait", 2)
        await here.stub.StopRun(pb.StopRunRequest(run_id=run_id), timeout=60.0)
        assert here.canaries.traces(await here.answers(run_id)) == set()
        _check_places(here, tmp_path)
    # The launcher's own stays, for copies of launcher.json, and only its owner can read it.
    token = here.runs / ".identity/_launcher/token"
    assert [*here.canaries.in_files(tmp_path, kept=False)] == [str(token.relative_to(tmp_path))]
    assert (token.stat().st_mode & 0o077, token.parent.stat().st_mode & 0o077) == (0, 0)
    assert not list((tmp_path / "tmp").iterdir())


def _all_restarted(run: pb.Run) -> bool:
    return len(run.replicas) == len(GIVEN) and all(
        replica.state == "running" and replica.restarts for replica in run.replicas
    )


def _check_processes(here: Here, run: pb.Run) -> None:
    assert here.canaries.on_command_lines() == {}
    of_service = {each.pid: each.service for each in run.replicas}
    children = [each for each in left_running(here.runs) if each.pid != here.launcher.pid]
    for process, found in here.canaries.in_environments(children).items():
        mark = psutil.Process(process).environ()[MARK_VARIABLE]
        service = re.split(r"[/-]\d+#", mark.rpartition("/")[2])[0]
        assert found == GIVEN[service], f"{service} {process}"
        of_service.pop(process, None)
    assert of_service == {}, "each replica was looked at"


def _check_places(here: Here, folder: Path) -> None:
    assert here.canaries.in_files(here.runs) == {}
    names = {path.name for path in here.runs.iterdir()}
    assert {"launcher.sqlite", "launcher.sqlite-wal", *KEPT} <= names
    assert here.canaries.traces((folder / "stderr").read_bytes()) == set()
    for path in (here.runs / KEPT[0], here.runs / KEPT[1]):
        for each in (path, *path.rglob("*")):
            wanted = 0o700 if each.is_dir() else 0o600
            assert stat.S_IMODE(each.stat().st_mode) == wanted, each


def _until_logged(path: Path, words: str, times: int) -> None:
    wait_until(lambda: path.read_text().count(words) >= times, state=path.read_text)


async def test_a_run_that_is_refused_or_fails_names_no_secret(tmp_path: Path) -> None:
    async with launcher(tmp_path) as here:
        refused = await here.start(here.wish())
        run = await here.until(refused, lambda run: run.state in ENDED)
        assert "Slack refuses the token in SLACK_BOT_TOKEN" in run.error
        crash = {"crash": "always", "repeats": list(here.canaries.values)}
        once = {"max_restarts": 0}
        skip = ("slack", "webhook")
        failed = await here.start(here.wish(skip=skip, learner=crash, launcher=once))
        run = await here.until(failed, lambda run: run.state in ENDED)
        assert "401 Unauthorized" in run.error
        text = [await here.answers(refused), await here.answers(failed)]
        for bad in ("{", json.dumps({"name": "x", "launcher": {"backend": "sky", "sky": {}}})):
            text.append(await _refusal(here.stub, bad))
        token = here.canaries.values["FLOTILLA_TOKEN"]
        text.append(await _refusal(here.stub, here.wish(), token=token))
        assert here.canaries.traces(b"".join(text)) == set()
        _check_places(here, tmp_path)
    assert here.canaries.in_files(tmp_path, kept=False) == {}


async def _refusal(stub: Any, wish: str, token: str = "") -> bytes:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    try:
        request = pb.StartRunRequest(request_id="bad", spec_json=wish)
        await stub.StartRun(request, timeout=60.0, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return f"{error.details()} {error.trailing_metadata()}".encode()
    raise AssertionError("it was not refused")


def test_every_secret_that_is_known_by_name_is_a_canary() -> None:
    workflow = (ROOT / ".github/workflows/train-skypilot.yml").read_text()
    of_workflow = {re.sub(r"_(TOOL|COMPUTER)_USE$", "", name) for name in SECRET.findall(workflow)}
    named = {
        *service_variables.SECRET_OWNERS,
        *LAUNCHERS_OWN,
        *service_variables.IDENTITY_VARIABLES,
    }
    known = {*of_workflow, *named, LauncherConfig().notify.slack.token_env}
    # FLOTILLA_TLS is made by the launcher, and is among the canaries by its keys. The places where
    # a repository has its data, keeps its checkpoints and sends its notifications open nothing, nor
    # do those of a Tinker service.
    places = {"CHECKPOINT_REMOTE", "DATA_SOURCE", "SLACK_CHANNEL", *service_variables.TINKER_PLACES}
    assert known - {TLS_VARIABLE} - places <= set(Canaries().environ("http://hook"))
