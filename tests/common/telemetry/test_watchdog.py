"""The watchdog names the stalled part and leaves the stacks."""

import asyncio
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from flotilla_common.telemetry.watchdog import Stages, Standstill, Watchdog


def test_a_stage_is_reported_past_its_limit_and_again_when_the_time_has_doubled() -> None:
    stages = Stages()
    stages.enter("publish", 10, now=0)
    assert stages.take_standstills(10) == []
    assert stages.take_standstills(11) == [Standstill("publish", 11)]
    assert stages.take_standstills(21) == []
    assert stages.take_standstills(23) == [Standstill("publish", 23)]


def test_progress_and_leaving_end_a_standstill() -> None:
    stages = Stages()
    first = stages.enter("turn", 10, now=0)
    second = stages.enter("turn", 10, now=0)
    stages.note_progress("turn", now=8)
    assert stages.take_standstills(17) == []
    stages.leave(first)
    assert stages.take_standstills(19) == [Standstill("turn", 11)]
    stages.leave(second)
    assert stages.take_standstills(1000) == []


async def test_a_stage_that_stands_still_is_named_with_all_stacks(tmp_path: Path) -> None:
    watchdog = Watchdog(limit_s=0.1, interval_s=0.05, dump_folder=tmp_path)

    async def the_task_that_waits() -> None:
        await asyncio.Event().wait()

    waiting = asyncio.create_task(the_task_that_waits())
    with capture_logs() as logs, watchdog.running(), watchdog.stage("publish"):
        await asyncio.sleep(0.5)
    waiting.cancel()
    report = logs[0]
    assert report["stage"] == "publish"
    assert report["log_level"] == "error"
    stacks = await asyncio.to_thread(Path(report["stacks"]).read_text)
    assert "the_task_that_waits" in stacks
    assert "Current thread" in stacks


async def test_a_blocked_event_loop_is_named(tmp_path: Path) -> None:
    watchdog = Watchdog(loop_limit_s=0.2, interval_s=0.05, dump_folder=tmp_path)
    with capture_logs() as logs, watchdog.running():
        await asyncio.sleep(0.4)
        assert not logs
        time.sleep(0.5)  # noqa: ASYNC251
    assert logs[0]["stage"] == "event_loop"


async def test_a_task_between_two_lines_is_in_the_dump(tmp_path: Path) -> None:
    async def wait() -> None:
        await asyncio.sleep(60)

    # Without a table of lines, as at some instructions of any coroutine.
    wait.__code__ = wait.__code__.replace(co_linetable=b"")
    waiting = asyncio.create_task(wait(), name="lineless")
    await asyncio.sleep(0)
    assert waiting.get_stack()[0].f_lineno is None
    watchdog, dump = Watchdog(), tmp_path / "dump.txt"
    with watchdog.running(), dump.open("w") as file:
        watchdog.dump(file)
    waiting.cancel()
    assert "lineless" in dump.read_text()
    assert "in wait" in dump.read_text()


async def test_a_dump_that_cannot_be_written_is_still_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watchdog = Watchdog(limit_s=0.05, interval_s=0.02, dump_folder=tmp_path / "file" / "x")
    with capture_logs() as logs, watchdog.running(), watchdog.stage("a/b c"):
        await asyncio.sleep(0.2)
    assert logs[0]["stage"] == "a/b c"
    assert logs[0]["stacks"].startswith("not written: ")


async def test_work_within_its_limit_is_not_reported() -> None:
    watchdog = Watchdog(limit_s=5, interval_s=0.02)
    with capture_logs() as logs, watchdog.running():
        for _ in range(5):
            with watchdog.stage("turn"):
                await asyncio.sleep(0.02)
    assert logs == []


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_a_stage_that_fails_is_left(error: type[BaseException]) -> None:
    now = 0.0
    watchdog = Watchdog(limit_s=1, clock=lambda: now)
    with pytest.raises(error), watchdog.stage("x"):
        raise error
    assert watchdog.take_standstills(100.0) == []


def test_many_stages_of_one_name_are_one_report() -> None:
    stages = Stages()
    for number in range(300):
        stages.enter("call tool", 10, now=number / 100)
    assert stages.take_standstills(11) == [Standstill("call tool", 11, count=300)]


def test_what_was_reported_is_reported_again_after_it_has_moved() -> None:
    stages = Stages()
    stages.enter("generate", 10, now=0)
    assert stages.take_standstills(15) == [Standstill("generate", 15)]
    stages.note_progress("generate", now=20)
    assert stages.take_standstills(25) == []
    assert stages.take_standstills(31) == [Standstill("generate", 11)]
