"""Limits of what a teacher costs, and the pace at which it is asked."""

import asyncio

from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.rpc.deadlines import loop_time
from flotilla_reading.data.collect.budget import Limits, Prices, RequestPace, Spending, find_spent


def test_a_limit_that_is_reached_is_named() -> None:
    spent, prices = Spending(3, 1_000_000, 500_000, 0), Prices(2.0, 8.0)
    assert spent.cost(prices) == 6.0
    assert find_spent(spent, Limits(), prices) == ""
    assert find_spent(spent, Limits(4, 1_500_001, 6.01), prices) == ""
    assert find_spent(spent, Limits(calls=3), prices) == "--max-calls 3 is reached"
    assert find_spent(spent, Limits(tokens=1_500_000), prices) == "--max-tokens 1500000 is reached"
    assert find_spent(spent, Limits(cost=6.0), prices) == "--max-cost 6 is reached"


async def test_requests_are_spaced_and_all_wait_while_the_endpoint_wants_none() -> None:
    pace, passed = RequestPace(1200), list[float]()

    async def ask() -> None:
        await pace.wait()
        passed.append(loop_time())
        if len(passed) == 2:
            pace.hold(0.3)

    async with running_tasks(*(ask() for _ in range(4))) as tasks:
        await asyncio.wait(tasks)
    first, second, third, fourth = passed
    assert second - first >= 0.049
    assert third - second >= 0.299
    assert fourth - third >= 0.049
