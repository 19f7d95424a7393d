"""The engine of `benchmarks.overlap`, against which its ratio is measured."""

import asyncio

import pytest

from benchmarks.overlap import Balance, SharedRate


async def test_all_who_are_served_share_the_rate() -> None:
    decoder, loop = SharedRate(1000.0), asyncio.get_running_loop()
    ended: list[int] = []

    async def take(tokens: int) -> None:
        await decoder.serve(tokens)
        ended.append(tokens)

    began = loop.time()
    await asyncio.gather(*(take(tokens) for tokens in (60, 20, 40)))
    assert ended == [20, 40, 60]
    # All 120 tokens, of both requests.
    assert loop.time() - began >= 0.12


async def test_a_loop_that_was_held_costs_no_tokens() -> None:
    decoder, loop = SharedRate(1000.0), asyncio.get_running_loop()
    waiting = [asyncio.create_task(decoder.serve(tokens)) for tokens in (10, 60)]
    await asyncio.sleep(0)
    # Held beyond the end of both: the second has had the whole rate since the first was done.
    until = loop.time() + 0.075
    while loop.time() < until:
        pass
    for _ in range(3):
        await asyncio.sleep(0)
    assert all(task.done() for task in waiting)


@pytest.mark.parametrize(
    ("ratio", "train_s", "rollout_s"), [(0.5, 10.0, 5.0), (1.0, 10.0, 10.0), (2.0, 5.0, 10.0)]
)
def test_the_longer_of_both_takes_ten_seconds(
    ratio: float, train_s: float, rollout_s: float
) -> None:
    balance = Balance.from_ratio(ratio)
    assert (balance.train_s, balance.rollout_s) == (train_s, rollout_s)
    assert balance.engine_rate(4) == balance.engine_rate(1) / 4
