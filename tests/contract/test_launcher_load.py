"""A hundred concurrent callers of a launcher: all get complete answers."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.rpc import rpc
from flotilla_common.rpc.rpc import service_error
from tests.contract.test_run_service import units, wish
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import TOKEN, ServedLauncher, serving

CALLERS = 100
BURSTS, LINES = 15, 10
# So short that every follower reconnects several times.
STREAM_AGE_S = 0.25


async def follow(stub: Any, run_id: str) -> list[str]:
    """All lines of the learner, over as many streams as it takes."""
    request = pb.TailLogsRequest(run_id=run_id, service="learner", follow=True)
    request.after_bytes["learner-0"] = 0
    lines: list[str] = []
    while True:
        try:
            async for line in stub.TailLogs(request, timeout=60.0):
                lines.append(line.line)
                request.after_bytes[line.source] = line.after_bytes
        except grpc.aio.AioRpcError as error:
            known = service_error(error)
            assert known is not None and known.reason == "STREAM_AGE", error
        else:
            return lines


async def write(log: Path) -> list[str]:
    """Write a log as a service does: bursts, and lines that are written in two halves."""
    written: list[str] = []
    for burst in range(BURSTS):
        lines = [f"burst {burst} line {line} {'x' * line * 20}" for line in range(LINES)]
        text = "".join(f"{line}\n" for line in lines)
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):
            with log.open("a") as file:
                file.write(half)
            await asyncio.sleep(0.03)
        written += lines
    return written


async def get(served: ServedLauncher, run_id: str, done: asyncio.Event) -> int:
    """Read the run again and again; return the number of answers."""
    for count in itertools.count():
        if done.is_set():
            return count
        assert (await served.get(run_id)).run_id == run_id
        await asyncio.sleep(0.1)
    raise AssertionError


async def beat(served: ServedLauncher, run_id: str, replica: int, done: asyncio.Event) -> int:
    """Send heartbeats of a rollout that was started by hand; return the number of answers."""
    who: dict[str, Any] = {"run_id": run_id, "service": "rollout", "incarnation": f"{replica}"}
    member = registry_pb.RegisterRequest(**who, replica=replica, address="127.0.0.1:9")
    await served.registry.Register(member)
    for count in itertools.count():
        if done.is_set():
            return count
        request = registry_pb.HeartbeatRequest(**who, replica=replica, serving=True)
        answer = await served.registry.Heartbeat(request, timeout=10.0)
        assert answer.command == registry_pb.COMMAND_NONE
        await asyncio.sleep(0.1)
    raise AssertionError


async def test_a_hundred_followers_miss_no_line_while_the_launcher_answers_everybody(
    tmp_path: Path,
) -> None:
    backend, done = FakeBackend(), asyncio.Event()
    async with (
        serving(tmp_path, backend, stream_age_s=STREAM_AGE_S) as served,
        rpc.channel(served.address, token=TOKEN) as channel,
    ):
        run_id = await served.start(wish())
        await units(backend, "learner")
        log = tmp_path / run_id / "logs" / "learner-0.log"
        log.parent.mkdir()
        log.touch()
        async with asyncio.TaskGroup() as group:
            stub: Any = RunServiceStub(channel)
            followers = [group.create_task(follow(stub, run_id)) for _ in range(CALLERS)]
            getters = [group.create_task(get(served, run_id, done)) for _ in range(CALLERS)]
            beaters = [group.create_task(beat(served, run_id, 10 + i, done)) for i in range(10)]
            written = await write(log)
            scale = pb.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=2)
            await served.runs.ScaleService(scale, timeout=10.0)
            await served.until(run_id, lambda run: len(run.replicas) == 4)
            done.set()
            await asyncio.gather(*getters, *beaters)
            await served.runs.StopRun(pb.StopRunRequest(run_id=run_id), timeout=30.0)
        assert len(written) == BURSTS * LINES
        assert Counter(tuple(each.result()) for each in followers) == {tuple(written): CALLERS}
        assert all(each.result() > 0 for each in getters)
        # They did not wait for each other: each was answered time and again meanwhile.
        assert all(each.result() > 2 for each in beaters)
