"""The line of an episode: shared places together, all others alone, in the order of arrival."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_env_gateway.episodes.turn_line import TurnLine, TurnPlace

# Enter with a shared place or one alone, or leave as the n-th of those in line.
Steps = st.lists(st.one_of(st.booleans(), st.integers(0, 9)), max_size=40)


@settings(deadline=None)
@given(Steps)
def test_turns_are_exactly_those_that_the_order_allows(steps: list[bool | int]) -> None:
    line, waiting = TurnLine(), list[TurnPlace]()
    for step in steps:
        if isinstance(step, bool):
            waiting.append(line.enter_line(TurnPlace(shared=step)))
        elif waiting:
            line.leave_line(waiting.pop(step % len(waiting)))
        for index, place in enumerate(waiting):
            readers = all(one.shared for one in waiting[: index + 1])
            assert place.turn.is_set() is (index == 0 or readers)


async def test_a_place_that_is_given_up_before_it_is_in_line_blocks_no_other() -> None:
    line, early = TurnLine(), TurnPlace()
    with pytest.raises(TimeoutError):
        async with line.hold_turn(early, asyncio.get_running_loop().time()):
            raise AssertionError("it was its turn")
    line.enter_line(early)
    assert line.enter_line(TurnPlace()).turn.is_set()


async def test_a_wait_that_is_cancelled_lets_those_behind_it_go() -> None:
    line = TurnLine()
    reader, writer, behind = (TurnPlace(shared=shared) for shared in (True, False, True))
    for place in (reader, writer, behind):
        line.enter_line(place)

    async def write() -> None:
        async with line.hold_turn(writer):
            raise AssertionError("it was its turn")

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    assert not behind.turn.is_set()
    writing.cancel()
    await asyncio.wait({writing})
    assert behind.turn.is_set()
