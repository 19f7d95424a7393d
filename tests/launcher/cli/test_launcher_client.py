"""Ctrl-C, and a remote launcher that hangs or is gone: no command waits forever, and none
reports what it cannot know."""

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1 import run_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_launcher.cli import follow_run, launcher_client
from flotilla_launcher.cli.follow_run import (
    FollowedRun,
    FollowOutcome,
    run_to_end,
    watch_until_left,
)
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.launcher_client import LauncherError
from flotilla_launcher.cli.progress_view import PlainView
from flotilla_launcher.cli.terminal import Terminal
from tests.launcher.cli.test_app import write_spec
from tests.support.launcher import TOKEN, forged_command
from tests.support.repository import ROOT
from tests.support.waiting import until


class Hanging(run_service_pb2_grpc.RunServiceServicer):
    """A launcher that answers the named calls and leaves all others without an answer."""

    def __init__(self, *answers: str) -> None:
        self.answers: tuple[str, ...] = answers
        self.requests: dict[str, Any] = {}

    async def _take(self, name: str, request: Any, answer: Any) -> Any:
        self.requests[name] = request
        if name not in self.answers:
            await asyncio.sleep(600)
        return answer

    async def StartRun(self, request: Any, context: Any) -> Any:
        return await self._take("StartRun", request, pb.StartRunResponse(run_id="far-1"))

    async def StopRun(self, request: Any, context: Any) -> Any:
        return await self._take("StopRun", request, pb.StopRunResponse())

    async def ListRuns(self, request: Any, context: Any) -> Any:
        return await self._take("ListRuns", request, pb.ListRunsResponse())

    async def Reap(self, request: Any, context: Any) -> Any:
        return await self._take("Reap", request, pb.ReapResponse())

    async def GetRun(self, request: Any, context: Any) -> Any:
        return await self._take("GetRun", request, pb.GetRunResponse())

    async def PlanRun(self, request: Any, context: Any) -> Any:
        return await self._take("PlanRun", request, pb.PlanRunResponse())

    async def ScaleService(self, request: Any, context: Any) -> Any:
        return await self._take("ScaleService", request, pb.ScaleServiceResponse())

    async def TailLogs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(600)
        yield

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests["WatchRun"] = request
        await asyncio.sleep(600)
        yield


@asynccontextmanager
async def elsewhere(double: Hanging) -> AsyncGenerator[str]:
    """The value of FLOTILLA_LAUNCHER for it."""
    server = rpc.server(token=TOKEN)
    run_service_pb2_grpc.add_RunServiceServicer_to_server(double, server)
    async with rpc.serving(server, "127.0.0.1:0", grace_s=0.1) as at:
        yield json.dumps({"address": at.address, "token": TOKEN})


@asynccontextmanager
async def cli(secret: str, *arguments: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """The `flotilla` command of a user who has this launcher.json."""
    process = await asyncio.create_subprocess_exec(
        *forged_command("-m", "flotilla_launcher.cli.app", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, "FLOTILLA_LAUNCHER": secret},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_submit_that_is_left_requests_no_stop_and_names_the_run(
    tmp_path: Path,
) -> None:
    double = Hanging("StartRun", "ListRuns")
    command = ("submit", str(write_spec(tmp_path)), "--request-id", "mine")
    async with elsewhere(double) as secret, cli(secret, *command) as process:
        await until(lambda: "WatchRun" in double.requests)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 20.0)
    assert "StopRun" not in double.requests
    assert process.returncode == 130
    assert "Run far-1 continues.\n  flotilla watch far-1   follows it\n" in output.decode()
    assert "  flotilla cancel mine   stops it\n" in output.decode()


async def test_a_submit_that_is_left_before_it_knows_of_a_run_shows_how_to_check(
    tmp_path: Path,
) -> None:
    double = Hanging("ListRuns")
    command = ("submit", str(write_spec(tmp_path)), "--request-id", "mine")
    async with elsewhere(double) as secret, cli(secret, *command) as process:
        await until(lambda: "StartRun" in double.requests)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 20.0)
    assert process.returncode == 130
    assert "may have begun: flotilla cancel mine makes sure it ends" in output.decode()


@pytest.mark.parametrize(
    ("arguments", "call", "expected"),
    [
        (("reap",), "Reap", "Interrupted"),
        (("cancel", "mine"), "StopRun", "the run may continue; stop it with: flotilla cancel mine"),
    ],
)
async def test_a_ctrl_c_ends_a_reap_and_a_cancel_at_once(
    arguments: tuple[str, ...], call: str, expected: str
) -> None:
    double = Hanging("ListRuns")
    async with elsewhere(double) as secret, cli(secret, *arguments) as process:
        await until(lambda: call in double.requests)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 20.0)
    assert process.returncode == 130
    assert expected in output.decode()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a second."""
    monkeypatch.setattr(launcher_client, "PATIENCE_S", 1.0)
    monkeypatch.setattr(launcher_client, "_PROBE_S", 0.3)
    monkeypatch.setattr(launcher_client, "_PAUSE_S", 0.1)
    monkeypatch.setattr(follow_run, "_WATCH_S", 0.5)


def training(tmp_path: Path, interrupts: Interrupts) -> asyncio.Task[FollowOutcome]:
    wish, console = pb.StartRunRequest(spec_json="{}"), Terminal(file=io.StringIO())
    return asyncio.create_task(run_to_end(tmp_path, wish, console, interrupts))


@pytest.mark.usefixtures("hasty")
async def test_a_launcher_elsewhere_that_is_gone_is_not_watched_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = Hanging("StartRun", "ListRuns")
    async with elsewhere(double) as secret:
        monkeypatch.setenv("FLOTILLA_LAUNCHER", secret)
        run = training(tmp_path, Interrupts())
        await until(lambda: "WatchRun" in double.requests)
        # A silent run does not mean that the launcher is gone.
        done, _ = await asyncio.wait({run}, timeout=3.0)
        assert not done
    with pytest.raises(LauncherError, match="its runs may continue without it"):
        await asyncio.wait_for(run, 20.0)


@pytest.mark.usefixtures("hasty")
async def test_a_submit_does_not_follow_a_launcher_that_is_gone_for_ever(tmp_path: Path) -> None:
    double = Hanging("StartRun", "ListRuns")
    async with elsewhere(double) as secret:
        address = json.loads(secret)["address"]
        there = launcher_client.LauncherAddress(address, TOKEN, 0, elsewhere=True)
        async with rpc.channel(address, token=TOKEN) as channel:
            stub: Any = run_service_pb2_grpc.RunServiceStub(channel)
            connection = launcher_client.LauncherConnection(tmp_path, stub, there, None)
            view = PlainView(Terminal(file=io.StringIO()))
            following = asyncio.create_task(
                watch_until_left(connection, FollowedRun(0, "far-1"), view, Interrupts())
            )
            await until(lambda: "WatchRun" in double.requests)
            # From here on every call hangs, as if the network were cut.
            double.answers = ()
            with pytest.raises(LauncherError, match="its runs may continue without it"):
                await asyncio.wait_for(following, 20.0)


async def test_a_start_elsewhere_that_is_interrupted_is_cancelled_by_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, interrupts = Hanging("StopRun"), Interrupts()
    async with elsewhere(double) as secret:
        monkeypatch.setenv("FLOTILLA_LAUNCHER", secret)
        run = training(tmp_path, interrupts)
        await until(lambda: "StartRun" in double.requests)
        interrupts.note_interrupt()
        outcome = await asyncio.wait_for(run, 20.0)
    assert double.requests["StopRun"].request_id == double.requests["StartRun"].request_id
    assert (outcome.run, outcome.interrupted) == (None, True)
    assert not (tmp_path / "launcher.sqlite").exists(), "its ledger is elsewhere"


async def test_without_the_launchers_confirmation_no_cancellation_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, interrupts = Hanging(), Interrupts()
    async with elsewhere(double) as secret:
        monkeypatch.setenv("FLOTILLA_LAUNCHER", secret)
        run = training(tmp_path, interrupts)
        await until(lambda: "StartRun" in double.requests)
        interrupts.note_interrupt()
        await until(lambda: "StopRun" in double.requests)
        interrupts.second.set()
        request_id = double.requests["StartRun"].request_id
        with pytest.raises(
            LauncherError, match=f"may continue; stop it with: flotilla cancel {request_id}"
        ):
            await asyncio.wait_for(run, 20.0)
