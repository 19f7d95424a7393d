"""Sets of weights take turns at an engine that holds one."""

import asyncio

import pytest

from flotilla_rollout.sampling.weight_turns import WeightTurns


class Loads:
    """An engine that notes what is loaded, and takes a moment for it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.fails = False
        self.turns = WeightTurns(self.load, 1, (0,))
        self.begun: list[int] = []

    async def load(self, name: int) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise OSError("no such folder")
        self.order.append(name)

    async def request(self, name: int, ends: asyncio.Event) -> None:
        async with self.turns.take_turn(name):
            assert name == (self.order or [0])[-1], "begun while another set was loaded"
            self.begun.append(name)
            await ends.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_of_the_loaded_set_run_concurrently_and_others_wait_for_them() -> None:
    loads, first, last = Loads(), asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for name, ends in ((0, first), (0, last), (1, last), (1, last)):
            group.create_task(loads.request(name, ends))
        await settle()
        assert loads.begun == [0, 0]
        first.set()
        await settle()
        assert loads.order == []
        last.set()
    assert loads.order == [1]


async def test_no_set_starves_and_those_that_wait_for_one_share_its_turn() -> None:
    loads, ends = Loads(), asyncio.Event()
    ended = asyncio.Event()
    ended.set()
    async with asyncio.TaskGroup() as group:
        group.create_task(loads.request(0, ends))
        await settle()
        for name in (1, 0, 2, 1, 0):
            group.create_task(loads.request(name, ended))
        await settle()
        assert loads.begun == [0], "a later request of the loaded set overtook a waiting one"
        ends.set()
    assert loads.order == [1, 0, 2]
    assert loads.begun == [0, 1, 1, 0, 0, 2]


async def test_a_waiting_request_that_is_cancelled_leaves_no_gap() -> None:
    loads, ends = Loads(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(loads.request(0, ends))
        await settle()
        given_up = group.create_task(loads.request(1, ends))
        await settle()
        given_up.cancel()
        ends.set()
    async with asyncio.timeout(5):
        await loads.request(0, ends)
    assert loads.order == []


async def test_a_request_cancelled_as_its_turn_begins_gives_it_back() -> None:
    loads, ends = Loads(), asyncio.Event()
    ends.set()
    for passes in range(12):
        waiting = asyncio.create_task(loads.request(passes + 1, asyncio.Event()))
        for _ in range(passes):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        async with asyncio.timeout(5):
            await loads.request(0, ends)


async def test_a_set_that_cannot_be_loaded_fails_its_requests_and_no_others() -> None:
    loads, ends = Loads(), asyncio.Event()
    ends.set()
    loads.fails = True
    with pytest.raises(OSError, match="no such folder"):
        await loads.request(1, ends)
    await loads.request(0, ends)
    assert loads.order == []


async def test_several_places_are_shared_and_given_on_as_they_fall_idle() -> None:
    loads = Loads()
    loads.turns = WeightTurns(loads.load, 2)
    begun: list[tuple[int, int]] = []
    ends = {name: asyncio.Event() for name in (1, 2, 3)}

    async def request(name: int, number: int) -> None:
        async with loads.turns.take_turn(name):
            begun.append((name, number))
            await ends[name].wait()

    async with asyncio.TaskGroup() as group:
        for name, number in ((1, 0), (2, 0), (1, 1)):
            group.create_task(request(name, number))
            await settle()
        assert begun == [(1, 0), (2, 0), (1, 1)]
        group.create_task(request(3, 0))
        await settle()
        group.create_task(request(1, 2))
        await settle()
        assert len(begun) == 3, "a place that is taken was given on, or a waiting one overtaken"
        ends[2].set()
        await settle()
        assert begun[3:] == [(3, 0), (1, 2)]
        ends[1].set()
        ends[3].set()
    assert loads.order == [1, 2, 3]
