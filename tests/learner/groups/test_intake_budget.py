"""Room for trajectories on their way in."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from flotilla_learner.groups.intake_budget import IntakeBudget, IntakeFullError


class Holder:
    """A stream that takes its place and holds it until a test releases it."""

    def __init__(self, room: IntakeBudget, worker_id: str, size: int, header: int = 0) -> None:
        self.placed, self.go = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold(room, worker_id, size, header))

    async def _hold(self, room: IntakeBudget, worker_id: str, size: int, header: int) -> None:
        async with room.reserve_bytes(worker_id, size, header=header):
            self.placed.set()
            await self.go.wait()

    async def leave(self) -> None:
        self.go.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def placed(*holders: Holder) -> list[bool]:
    return [holder.placed.is_set() for holder in holders]


async def end(*holders: Holder) -> None:
    for holder in holders:
        holder.task.cancel()
    await asyncio.gather(*(holder.task for holder in holders), return_exceptions=True)


async def test_a_holder_without_room_waits_until_one_leaves() -> None:
    room = IntakeBudget(worker_bytes=100, total_bytes=100)
    first, second = Holder(room, "a", 60), Holder(room, "b", 60)
    await settle()
    assert placed(first, second) == [True, False]
    await first.leave()
    await settle()
    assert placed(second) == [True]
    await second.leave()
    assert room.taken_bytes == 0


async def test_a_worker_at_its_bound_holds_up_no_other() -> None:
    room = IntakeBudget(worker_bytes=50, total_bytes=200)
    mine = [Holder(room, "a", 40) for _ in range(3)]
    other = Holder(room, "b", 40)
    await settle()
    assert placed(*mine, other) == [True, False, False, True]
    await end(*mine, other)
    assert room.taken_bytes == 0


async def test_the_large_one_is_not_overtaken_for_ever() -> None:
    room = IntakeBudget(worker_bytes=100, total_bytes=100)
    small, large, late = Holder(room, "a", 40), Holder(room, "b", 90), Holder(room, "c", 40)
    await settle()
    assert placed(small, large, late) == [True, False, False]
    await small.leave()
    await settle()
    assert placed(large, late) == [True, False]
    await end(large, late)


async def test_what_is_larger_than_a_bound_comes_in_alone() -> None:
    room = IntakeBudget(worker_bytes=10, total_bytes=20)
    large, other = Holder(room, "a", 500), Holder(room, "b", 5)
    await settle()
    assert placed(large, other) == [True, False]
    await large.leave()
    await settle()
    assert placed(other) == [True]
    await end(other)


async def test_who_gives_up_waiting_lets_the_next_one_in() -> None:
    room = IntakeBudget(worker_bytes=100, total_bytes=100)
    first, large, small = Holder(room, "a", 60), Holder(room, "b", 90), Holder(room, "c", 30)
    await settle()
    assert placed(first, large, small) == [True, False, False]
    await end(large)
    assert placed(small) == [True]
    await end(first, small)
    assert room.taken_bytes == 0


async def test_more_headers_than_the_room_holds_do_not_wait() -> None:
    room = IntakeBudget(worker_bytes=100, total_bytes=100)
    waiting = [Holder(room, "a", 100, header=0), *(Holder(room, "a", 100, 50) for _ in range(2))]
    await settle()
    async with AsyncExitStack() as stack:
        with pytest.raises(IntakeFullError, match="2 trajectories are already waiting"):
            await stack.enter_async_context(room.reserve_bytes("b", 1, header=1))
    await end(*waiting)
    assert room.taken_bytes == 0
