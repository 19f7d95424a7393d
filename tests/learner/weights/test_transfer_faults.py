"""A sender or a receiver that is killed or stopped at any stage of a transfer: the others are sent
this publication or the next, and it is sent a whole one when it is back."""

import asyncio
import itertools
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flotilla_learner.weights import live_sender
from flotilla_learner.weights.live_sender import LiveSender
from tests.support.process_commands import command_of
from tests.support.repository import ROOT
from tests.support.transfer_faults import RECEIVER_STAGES, SENDER_STAGES
from tests.support.transfer_trials import PATIENCE_S, SentModel, Way, receiving, sending
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FAILING = "tests.support.failing_sender"
# At the others the sender waits for nothing of the receiver's.
NOTICED = {"open", "answer", "piece", "late_piece", "load"}
GIVEN_UP = ("an engine is lost", "no engine has joined")


@dataclass(frozen=True, slots=True)
class Failing:
    """A receiver that was started as a process of its own."""

    pid: int
    place: Path

    @property
    def has_failed(self) -> bool:
        return is_over(self.pid)

    async def received(self, index: int) -> str:
        """Return the digest of its publication number `index`, or the error."""
        path = self.place.with_name(f"{self.place.name}.{index}")
        await until(path.exists, PATIENCE_S)
        return path.read_text()


class Receivers:
    """Receivers in processes of their own, which are killed or stopped."""

    def __init__(self, process: Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._started: list[Failing] = []

    async def start(
        self, sender: LiveSender, how: str, stage: str, *published: SentModel
    ) -> Failing:
        """Start a receiver of these that fails by `how` at a stage."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        place = self._folder / f"receiver{len(self._started)}"
        manifests = " ".join(str(each.manifest_path) for each in published)
        line = f"{place} {sender.address} {how} {stage} {manifests}\n"
        self._process.stdin.write(line.encode())
        async with asyncio.timeout(PATIENCE_S):
            pid = int(await self._process.stdout.readline())
        self._started.append(Failing(pid, place))
        return self._started[-1]

    def kill_all(self) -> None:
        for child in psutil.Process(self._process.pid).children():
            # Those of a test that fails may end on their own.
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.kill()


@asynccontextmanager
async def receivers_in(folder: Path, way: Way) -> AsyncGenerator[Receivers]:
    command = (sys.executable, "-m", "tests.support.failing_receivers", way.backend)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    receivers = Receivers(process, folder)
    try:
        yield receivers
    finally:
        receivers.kill_all()
        await process.wait()


@pytest.mark.parametrize("way", [Way("gloo"), Way("ipc")], ids=str)
async def test_receivers_that_fail_at_any_stage_hold_up_no_other(tmp_path: Path, way: Way) -> None:
    first, second = (SentModel(tmp_path, version) for version in range(2))
    async with (
        sending(tmp_path, way) as sender,
        receiving(way, sender, "well") as (well,),
        receivers_in(tmp_path, way) as receivers,
    ):
        await sender.serve_publication(first.written, first.policy)
        stages = {"kill": {}, "stop": {}}
        for how, failing in stages.items():
            for stage in RECEIVER_STAGES:
                failing[stage] = await receivers.start(sender, how, stage, first, second)
        killed, stopped = stages.values()
        for failing in (*killed.values(), *stopped.values()):
            await until(lambda each=failing: each.has_failed, PATIENCE_S)
        for each in (first, second):
            await sender.serve_publication(each.written, each.policy)
            assert await well.receive(each) == each.digest
        log = tmp_path / "sender.log"
        lost = 2 * len(NOTICED)
        await until(lambda: sum(map(log.read_text().count, GIVEN_UP)) == lost, PATIENCE_S)
        for stage, failing in stopped.items():
            os.kill(failing.pid, signal.SIGCONT)
            answer = await failing.received(0)
            is_right = "Error" in answer if stage in NOTICED else answer == first.digest
            assert is_right, (stage, answer)
            assert await failing.received(1) == second.digest, stage
        successor = await receivers.start(sender, "never", "join", second)
        assert await successor.received(0) == second.digest


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_sender_that_fails_at_any_stage_costs_engines_one_publication(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_sender, "_MODULE", FAILING)
    armed = tmp_path / "armed"
    armed.mkdir()
    way, versions = Way("gloo"), itertools.count()
    async with (
        sending(tmp_path, way, f"{how}-{armed}") as sender,
        receivers_in(tmp_path, way) as receivers,
    ):
        for stage in SENDER_STAGES:
            await check_sent(sender, receivers, SentModel(tmp_path, next(versions)))
            (armed / stage).touch()
            await check_cut_off(sender, receivers, SentModel(tmp_path, next(versions)))
            fetched = SentModel(tmp_path, next(versions))
            await sender.serve_publication(fetched.written, fetched.policy)
            assert not sender.can_send(fetched.policy)
            await until(lambda: is_there(sender), PATIENCE_S)
        await check_sent(sender, receivers, SentModel(tmp_path, next(versions)))


async def check_sent(sender: LiveSender, receivers: Receivers, published: SentModel) -> None:
    """Two receivers join a sender and get a publication."""
    started = await start_two(sender, receivers, published)
    assert [await each.received(0) for each in started] == [published.digest] * 2


async def check_cut_off(sender: LiveSender, receivers: Receivers, published: SentModel) -> None:
    """A sender fails as two receive: each has got all of it, or an error."""
    [process] = [each for each in psutil.Process().children() if FAILING in command_of(each)]
    started = await start_two(sender, receivers, published)
    await until(lambda: is_over(process.pid), PATIENCE_S)
    # Before the next publication, which would find it otherwise.
    await until(lambda: not sender.can_send(published.policy), PATIENCE_S)
    answer = [await each.received(0) for each in started]
    assert all(each == published.digest or "Error" in each for each in answer), answer
    assert any("Error" in each for each in answer), answer


async def start_two(
    sender: LiveSender, receivers: Receivers, published: SentModel
) -> list[Failing]:
    await sender.serve_publication(published.written, published.policy)
    assert sender.can_send(published.policy)
    return [await receivers.start(sender, "never", "join", published) for _ in range(2)]


def is_there(sender: LiveSender) -> bool:
    """Return True once the sender is there, which each publication has started."""
    sender.start_soon()
    return sender.address is not None


def is_over(pid: int) -> bool:
    """Return True once a process is dead or stopped."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
