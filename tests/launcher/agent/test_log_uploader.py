"""The log of a replica on another machine arrives once, whatever is cut off or killed meanwhile."""

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest

from flotilla.launcher.v1 import run_service_pb2 as run_pb
from tests.support.watched_machine import WatchedMachine, machine


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_every_line_arrives_once_over_cuts_and_kills(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    truth = tmp_path / "truth"
    async with machine(tmp_path) as here:
        for number in (1, 2):
            process = await here.watch("count", str(truth))
            await _begins(here, number)
            await _cut_off_now_and_then(here, rng)
            await here.kill(process)
        process = await here.watch("count", str(truth))
        await _begins(here, 3)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 40)
        _compare(truth.read_text().splitlines(), _lines(here.log()))


async def _begins(here: WatchedMachine, number: int) -> None:
    await here.until(lambda: here.log().count("count begins") == number)


async def _cut_off_now_and_then(here: WatchedMachine, rng: random.Random) -> None:
    """Restart the launcher's server now and then, with a different memory of what it has."""
    for _ in range(3):
        await asyncio.sleep(rng.uniform(0.1, 0.9))
        await here.registry.down()
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        await here.registry.up()
    await asyncio.sleep(rng.uniform(0.1, 0.9))


def _lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("line ")]


def _compare(truth: list[str], arrived: list[str]) -> None:
    """A worker that is killed may have printed one line more than it has reported."""
    assert len(truth) > 200
    assert len(set(arrived)) == len(arrived)
    reported = set(truth)
    assert [line for line in arrived if line in reported] == truth
    assert len(arrived) - len(truth) <= 3


async def test_logs_that_a_service_keeps_beside_its_own_arrive_once_too(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        beside = here.run_dir / "logs" / "rollout-engine-0.log"
        arrived = here.served.launcher.folder / here.run_id / "logs" / beside.name
        process = await here.watch("count", str(tmp_path / "truth"))
        await here.begins()
        beside.parent.mkdir(parents=True)
        beside.write_text("one\n")
        await here.until(lambda: arrived.exists() and arrived.read_text() == "one\n")
        await here.kill(process)
        process = await here.watch("count", str(tmp_path / "truth"))
        await _begins(here, 2)
        with beside.open("a") as file:
            file.write("two\nno line yet")
        process.send_signal(signal.SIGTERM)
        await process.wait()
        assert arrived.read_text() == "one\ntwo\nno line yet"
        request = run_pb.TailLogsRequest(run_id=here.run_id, service="rollout", lines=10)
        reported = [answer async for answer in here.served.runs.TailLogs(request)]
        assert [a.line for a in reported if a.source == beside.stem] == [
            "one",
            "two",
            "no line yet",
        ]


async def test_a_further_machine_brings_the_logs_of_its_own_ranks_and_no_others(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path) as here:
        there = here.served.launcher.folder / here.run_id / "logs"
        logs = here.run_dir / "logs"
        logs.mkdir(parents=True)
        own = ("learner-node-1-rank-2.log", "learner-node-1.log")
        # Machines of a Slurm share the folder.
        for name in (own[0], "learner-rank-0.log", "learner-node-2-rank-4.log", "learner-a_b.log"):
            (logs / name).write_text("out of memory\n")
        options = ("--node", "1")
        process = await here.watch("serve", service="learner", options=options)
        await here.until(lambda: all((there / name).exists() for name in own))
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        await process.wait()
        assert time.monotonic() - begun < 15, "nothing is refused again and again"
        assert (there / own[0]).read_text() == "out of memory\n"
        assert {path.name for path in there.glob("*.log")} == set(own)


@pytest.mark.parametrize("followers", [25, pytest.param(100, marks=pytest.mark.slow)])
async def test_many_followers_of_a_log_see_all_of_it_and_cost_little(
    tmp_path: Path, followers: int
) -> None:
    async with machine(tmp_path) as here:
        process = await here.watch("count", str(tmp_path / "truth"))
        await here.begins()
        request = run_pb.TailLogsRequest(
            run_id=here.run_id, service="rollout", follow=True, lines=1_000_000
        )
        spent = time.process_time()
        heads = await asyncio.gather(*(_head(here, request) for _ in range(followers)))
        # Generous: the launcher, its many clients and this test are one process here.
        assert time.process_time() - spent < 0.16 * followers
        assert all(head == heads[0] for head in heads)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 40)


async def _head(here: WatchedMachine, request: run_pb.TailLogsRequest) -> list[str]:
    """The first lines that one follower gets."""
    lines: list[str] = []
    call = here.served.runs.TailLogs(request)
    async for answer in call:
        lines.append(answer.line)
        if len(lines) == 100:
            break
    call.cancel()
    return lines
