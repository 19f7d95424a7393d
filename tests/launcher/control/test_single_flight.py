"""A start that takes longer than its callers wait is done once, and only while one waits."""

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.control.single_flight import SharedWork, WorkCancelledError
from tests.launcher.control.test_replica_actions import HesitantBackend
from tests.support.launcher import serving, spec
from tests.support.waiting import until


class Work:
    """Ends on `done`; counts how often it was begun and cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.done = asyncio.Event()

    async def __call__(self) -> str:
        self.begun += 1
        try:
            await self.done.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return f"result {self.begun}"


async def test_a_repeat_joins_what_a_caller_without_patience_has_begun() -> None:
    joint, work = SharedWork[str, str](), Work()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(joint.join_or_begin("one", work), 0.01)
    repeats = [asyncio.create_task(joint.join_or_begin("one", work)) for _ in range(3)]
    await asyncio.sleep(0.01)
    work.done.set()
    assert await asyncio.gather(*repeats) == ["result 1"] * 3
    assert await joint.join_or_begin("one", work) == "result 2", "what is done is not under way"


async def test_abandoned_work_is_given_up_and_can_be_begun_again() -> None:
    joint, work = SharedWork[str, str](abandoned_after_s=0.05), Work()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(joint.join_or_begin("one", work), 0.01)
    await until(lambda: work.cancelled, 5.0)
    work.done.set()
    assert await joint.join_or_begin("one", work) == "result 2"


async def test_cancelled_work_raises_for_its_waiters() -> None:
    joint, work = SharedWork[str, str](), Work()
    waiting = asyncio.create_task(joint.join_or_begin("one", work))
    other = asyncio.create_task(joint.join_or_begin("two", work))
    await asyncio.sleep(0.01)
    joint.cancel_matching(lambda key: key == "one")
    with pytest.raises(WorkCancelledError):
        await waiting
    work.done.set()
    assert await other == "result 2"


async def test_a_failure_without_a_waiter_disturbs_no_other() -> None:
    async def fail() -> str:
        await asyncio.sleep(0.02)
        raise ValueError("no")

    joint = SharedWork[str, str]()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(joint.join_or_begin("one", fail), 0.01)
    await asyncio.sleep(0.05)
    with pytest.raises(ValueError, match="no"):
        await joint.join_or_begin("one", fail)


async def test_a_start_with_a_short_deadline_is_repeated_until_the_run_has_begun(
    tmp_path: Path,
) -> None:
    backend = HesitantBackend()
    async with serving(tmp_path, backend) as served:
        while not backend.queried.is_set():
            # Each deadline is shorter than the check of the spec alone.
            with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
                await served.start(spec(), request_id="mine", timeout_s=0.1)
        assert backend.offers == 1, "each repeat has begun it again"
        backend.proceed.set()
        run_id = await served.start(spec(), request_id="mine")
        assert [stored.run.run_id for stored in served.launcher.store.list_newest()] == [run_id]


async def test_a_start_that_is_cancelled_while_it_is_under_way_begins_nothing(
    tmp_path: Path,
) -> None:
    backend = HesitantBackend()
    async with serving(tmp_path, backend) as served:
        starting = asyncio.ensure_future(served.start(spec(), request_id="mine"))
        await backend.queried.wait()
        answer = await served.runs.StopRun(pb.StopRunRequest(request_id="mine"))
        assert answer.run_id == ""
        with pytest.raises(grpc.aio.AioRpcError, match="was cancelled before it began a run"):
            await starting
        assert served.launcher.store.list_newest() == []
