"""Concurrent coroutines: the first failure ends all, cleanup completes, no cancellation is lost."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from flotilla_common.aio import concurrency

# More turns of the loop than any of the scenarios takes.
MOMENTS = 24


class Work:
    """Coroutines that count themselves, and whose cleanup takes turns of the loop."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.stop = asyncio.Event()

    async def run(
        self, turns: int, error: Exception | None = None, cleanup_error: Exception | None = None
    ) -> str:
        """Take `turns` turns of the loop, then fail with `error` or return."""
        self.begun += 1
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.ended += 1
            if cleanup_error is not None:
                raise cleanup_error from None
            raise
        self.ended += 1
        if error is not None:
            raise error
        return "result"

    async def set_stop(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        self.stop.set()


LONG = 1000
Scenario = Callable[[Work], Coroutine[Any, Any, Any]]


async def _with_tasks(work: Work) -> None:
    async with concurrency.running_tasks(work.run(3), work.run(LONG)) as tasks:
        await concurrency.wait_for_any(tasks)


async def _with_stop(work: Work) -> None:
    async with concurrency.running_tasks(work.set_stop(3)):
        await concurrency.run_unless(work.stop, work.run(LONG))


async def _with_task_of_others(work: Work) -> None:
    async with concurrency.running_tasks(work.run(5), work.set_stop(3)) as (task, _):
        await concurrency.wait_unless(work.stop, task)


async def _with_slow_cleanup(work: Work) -> None:
    tasks = [asyncio.create_task(work.run(LONG)) for _ in range(2)]
    try:
        await asyncio.sleep(0)
    finally:
        await concurrency.cancel_tasks(tasks)


async def _with_failure(work: Work) -> None:
    try:
        await concurrency.run_until_first(work.run(3, ValueError("x")), work.run(LONG))
    except ValueError:
        await asyncio.sleep(0)


async def _run_beside(main: Coroutine[Any, Any, str], *beside: Coroutine[Any, Any, Any]) -> str:
    async with (
        concurrency.running_tasks(*beside) as tasks,
        concurrency.running_tasks(main) as (first,),
    ):
        return await concurrency.wait_beside(first, tasks)


SCENARIOS: dict[str, Scenario] = {
    "running_tasks": _with_tasks,
    "run_unless": lambda work: concurrency.run_unless(work.stop, work.run(3)),
    "run_unless, stopped": _with_stop,
    "run_until_first": lambda work: concurrency.run_until_first(work.run(3), work.run(LONG)),
    "run_until_first, failed": _with_failure,
    "wait_beside": lambda work: _run_beside(work.run(3), work.run(1), work.run(LONG)),
    "wait_unless": _with_task_of_others,
    "cancel_tasks": _with_slow_cleanup,
}


async def _turn_loop(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def _call(scenario: Scenario, work: Work) -> None:
    await scenario(work)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_a_cancellation_is_never_lost_and_waits_for_cleanup(scenario: Scenario) -> None:
    accepted = True
    for moment in range(MOMENTS):
        work = Work()
        task = asyncio.create_task(_call(scenario, work))
        await _turn_loop(moment)
        accepted = task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() == accepted, f"lost at moment {moment}"
        assert work.ended == work.begun, f"left running at moment {moment}"
    assert not accepted, "the scenario takes more turns than are tried"


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_a_second_cancellation_does_not_break_into_cleanup(scenario: Scenario) -> None:
    for moment in range(MOMENTS):
        for later in range(4):
            work = Work()
            task = asyncio.create_task(_call(scenario, work))
            await _turn_loop(moment)
            accepted = task.cancel()
            await _turn_loop(later)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() == accepted, f"lost at moment {moment}, then {later}"
            assert work.ended == work.begun, f"broken into at moment {moment}, then {later}"


async def test_an_outer_deadline_is_distinguished_from_a_cancellation() -> None:
    work = Work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await concurrency.run_until_first(work.run(10**9), work.run(10**9))
    assert work.ended == work.begun == 2


async def test_a_failure_of_each_ends_all() -> None:
    for failing in range(3):
        work = Work()
        coroutines = [
            work.run(2, ValueError(str(index))) if index == failing else work.run(LONG)
            for index in range(3)
        ]
        with pytest.raises(ValueError, match=str(failing)):
            await concurrency.run_until_first(*coroutines)
        assert work.ended == work.begun == 3


async def test_of_two_failures_at_once_the_first_named_is_raised() -> None:
    work = Work()
    with pytest.raises(ValueError, match="first"):
        await concurrency.run_until_first(
            work.run(2, ValueError("first")), work.run(2, ValueError("second"))
        )
    with pytest.raises(ValueError, match="first"):
        await _run_beside(work.run(2, ValueError("first")), work.run(2, ValueError("second")))
    assert work.ended == work.begun == 4


async def test_a_failure_in_the_cleanup_of_others_is_raised_when_the_first_just_ended() -> None:
    work = Work()
    with pytest.raises(ValueError, match="cleanup"):
        await concurrency.run_until_first(
            work.run(2), work.run(LONG, cleanup_error=ValueError("cleanup"))
        )


async def test_a_failure_comes_before_one_in_the_cleanup_of_others() -> None:
    work = Work()
    with pytest.raises(ValueError, match="real"):
        await concurrency.run_until_first(
            work.run(LONG, cleanup_error=ValueError("cleanup")), work.run(2, ValueError("real"))
        )


async def test_a_result_that_comes_with_the_stop_is_kept() -> None:
    work = Work()
    work.stop.set()
    assert await concurrency.run_unless(work.stop, _return_now("here")) == "here"
    assert await concurrency.run_unless(work.stop, work.run(LONG)) is None
    assert await concurrency.run_unless(asyncio.Event(), work.run(2)) == "result"


async def _return_now(value: str) -> str:
    return value


async def test_work_fails_its_caller_before_the_stop_and_not_by_its_cleanup_after() -> None:
    work = Work()
    with pytest.raises(ValueError, match="x"):
        await concurrency.run_unless(work.stop, work.run(1, ValueError("x")))
    work.stop.set()
    failing = work.run(LONG, cleanup_error=ValueError("cleanup"))
    assert await concurrency.run_unless(work.stop, failing) is None


async def test_the_end_of_what_runs_beside_ends_nothing_but_its_failure_does() -> None:
    work = Work()
    assert await _run_beside(work.run(6), work.run(1), work.run(LONG)) == "result"
    assert work.ended == work.begun == 3
    with pytest.raises(ValueError, match="beside"):
        await _run_beside(work.run(LONG), work.run(1), work.run(2, ValueError("beside")))
    assert work.ended == work.begun == 6


async def test_a_task_of_another_owner_is_waited_for_and_left_running() -> None:
    work = Work()
    task = asyncio.create_task(work.run(LONG))
    assert not await concurrency.wait_unless(work.stop, task, timeout_s=0.001)
    work.stop.set()
    assert not await concurrency.wait_unless(work.stop, task)
    assert not task.done() and not task.cancelling()
    assert await concurrency.wait_unless(asyncio.Event(), task)
    assert task.result() == "result"


async def test_the_wait_for_any_ends_with_the_first_or_with_its_time() -> None:
    work = Work()
    async with concurrency.running_tasks(work.run(2), work.run(LONG)) as (short, long):
        assert await concurrency.wait_for_any([short, long])
        assert short.done() and not long.done()
        assert not await concurrency.wait_for_any([long], timeout_s=0)


async def _swallow() -> None:
    """Lose a cancellation, as `asyncio.wait_for` of Python 3.11 may."""
    try:
        await asyncio.sleep(LONG)
    except asyncio.CancelledError:
        return


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_cancellation_that_the_block_swallows_is_raised_at_its_end(guarded: bool) -> None:
    async def wait_inside() -> str:
        if not guarded:
            await _swallow()
        else:
            with concurrency.keep_cancellation():
                await _swallow()
        return "went on"

    task = asyncio.create_task(wait_inside())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() == guarded


async def test_a_deadline_within_the_block_is_no_cancellation() -> None:
    with concurrency.keep_cancellation(), pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.sleep(LONG)


async def test_what_failed_before_it_was_cancelled_is_raised() -> None:
    work = Work()
    tasks = [asyncio.create_task(work.run(LONG)), asyncio.create_task(_fail(ValueError("before")))]
    await asyncio.sleep(0)
    await concurrency.cancel_tasks(tasks)
    with pytest.raises(ValueError, match="before"):
        concurrency.raise_failure(tasks)
    concurrency.raise_failure(tasks[:1])


async def _fail(error: Exception) -> None:
    raise error


async def test_a_task_that_is_cancelled_already_is_left_to_clean_up() -> None:
    work = Work()
    task = asyncio.create_task(work.run(LONG))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await concurrency.cancel_tasks([task])
    assert work.ended == 1


async def test_a_task_whose_own_timeout_expires_meanwhile_is_cancelled_all_the_same() -> None:
    async def pause_again_and_again() -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()

    async def cancel_as_the_pause_ends() -> None:
        await asyncio.sleep(0)
        time.sleep(0.02)  # noqa: ASYNC251 - the loop is held up over the end of the pause
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert task.cancelling() == 1, "the timeout has expired, and its task does not know yet"
        await concurrency.cancel_tasks([task])

    task = asyncio.create_task(pause_again_and_again())
    ending = asyncio.create_task(cancel_as_the_pause_ends())
    await asyncio.wait({ending}, timeout=5)
    assert ending.done() and task.cancelled()
    await ending
