"""A real launcher reports a run to Slack, and so does its successor after a kill -9."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.rpc import rpc
from flotilla_launcher.security.launcher_address import read_address
from tests.launcher.notify.slack_double import CHANNEL_ID, TOKEN, SlackDouble, slack
from tests.support.launcher import spec
from tests.support.launcher_process import address_of, start_launcher
from tests.support.waiting import until_seen

ENDED = (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_FAILED, pb.RUN_STATE_STOPPED)


@asynccontextmanager
async def launcher(runs: Path) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Any]]:
    """A launcher whose fakes are forks of a forge, as it is itself, and a client of it."""
    process = await start_launcher(runs, SLACK_BOT_TOKEN=TOKEN)
    try:
        at = await address_of(runs, process)
        async with rpc.channel(at.address, token=at.token) as channel:
            yield process, RunServiceStub(channel)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until(runs: Any, run_id: str, states: tuple[int, ...]) -> pb.Run:
    async def get() -> pb.Run:
        return (await runs.GetRun(pb.GetRunRequest(run_id=run_id), timeout=5.0)).run

    return await until_seen(get, lambda run: run.state in states)


def wish(double: SlackDouble, steps: int) -> str:
    notify = {"slack": {"channel": CHANNEL_ID, "api_url": double.url}}
    learner = {"steps": steps, "step_s": 0.1}
    return json.dumps(spec(launcher={"notify": notify, "max_hours": 9.0}, learner=learner))


def heads(double: SlackDouble) -> list[str]:
    return [text.splitlines()[0].partition(" ")[2] for text in double.texts]


def test_the_successor_of_a_killed_launcher_uses_the_same_thread(tmp_path: Path) -> None:
    asyncio.run(kill_and_go_on(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "launcher.sqlite" for path in files)
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


async def kill_and_go_on(folder: Path) -> None:
    async with slack() as double:
        request = pb.StartRunRequest(request_id="r1", spec_json=wish(double, 20))
        async with launcher(folder) as (process, runs):
            run_id = (await runs.StartRun(request, timeout=60.0)).run_id
            await until(runs, run_id, (pb.RUN_STATE_RUNNING,))
            address = read_address(folder)
            assert address is not None
            os.kill(address.pid, signal.SIGKILL)
            await process.wait()
        async with launcher(folder) as (_, runs):
            assert (await runs.StartRun(request, timeout=60.0)).run_id == run_id
            await until(runs, run_id, (pb.RUN_STATE_COMPLETED,))
        assert heads(double) == ["*Run started*", "*Run completed*"]
        assert double.messages[1]["thread_ts"] == double.messages[0]["ts"]
        assert "*Machines:* verified" in double.texts[1]


async def test_a_failure_is_sent_with_the_end_of_the_log(tmp_path: Path) -> None:
    async with slack() as double:
        text = json.loads(wish(double, 600))
        text |= {"rollout": {"crash": "always"}}
        text["launcher"]["max_restarts"] = 0
        async with launcher(tmp_path) as (_, runs):
            request = pb.StartRunRequest(request_id="r1", spec_json=json.dumps(text))
            run_id = (await runs.StartRun(request, timeout=60.0)).run_id
            await until(runs, run_id, (pb.RUN_STATE_FAILED,))
        assert heads(double) == ["*Run started*", "*Run failed*"]
        assert double.texts[1].count("last words: out of luck") == 1


async def test_a_run_that_ends_with_its_launcher_says_so(tmp_path: Path) -> None:
    async with slack() as double:
        async with launcher(tmp_path) as (process, runs):
            request = pb.StartRunRequest(request_id="r1", spec_json=wish(double, 600))
            run_id = (await runs.StartRun(request, timeout=60.0)).run_id
            await until(runs, run_id, (pb.RUN_STATE_RUNNING,))
            process.terminate()
            await process.wait()
        assert heads(double) == ["*Run started*", "*Run cancelled*"]
        assert "its launcher was stopped (SIGTERM or Ctrl-C)" in double.texts[1]


async def test_a_run_is_none_the_worse_for_a_slack_that_refuses(tmp_path: Path) -> None:
    async with slack() as double:
        text = wish(double, 2).replace(CHANNEL_ID, "C0ELSEWHERE")
        async with launcher(tmp_path) as (_, runs):
            request = pb.StartRunRequest(request_id="r1", spec_json=text)
            run_id = (await runs.StartRun(request, timeout=60.0)).run_id
            await until(runs, run_id, (pb.RUN_STATE_COMPLETED,))
        assert double.messages == []
