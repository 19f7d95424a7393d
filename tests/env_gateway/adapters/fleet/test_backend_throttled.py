"""Grades and warm-ups when Fleet throttles: none is lost, and not too many are under way."""

import asyncio
import time
from typing import Any

import pytest

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench


def throttled(*on: str, rate: float = 0.0, times: int = 0, after_s: float = 0.1) -> dict[str, Any]:
    """The first `times` requests are refused, and then each with the probability `rate`."""
    reply = {"status": 429, "body": {"detail": "Rate limit exceeded"}, "retry_after": after_s}
    return {"on": on, "replies": [reply] * times, "rate": rate, "reply": reply}


async def graded(gateway: Gateway, session: Session, timeout_s: float = 120.0) -> Grade:
    return await gateway.grade_episode(session, "", None, timeout_s)


async def test_refusals_cost_a_grade_no_attempt_and_are_waited_for(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await bench.solve(session)
        await emulator.faults(faults=[throttled("execute_verifier", times=6, after_s=0.3)])
        started = time.monotonic()
        grade = await graded(bench.gateway, session)
        assert (grade.reward, grade.attempts) == (1.0, 1)
        assert time.monotonic() - started >= 6 * 0.3


@pytest.mark.slow
async def test_a_zero_that_was_found_is_only_confirmed_again(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        await emulator.faults(faults=[throttled("get_instance", times=6)])
        await emulator.call("DELETE", "/_emulator/counters")
        grade = await graded(bench.gateway, session)
        assert (grade.reward, grade.attempts) == (0.0, 1)
        assert (await emulator.count())["requests"]["execute_verifier"] == 1


# The third run of those refused after 0.3 s would have 0.2 s.
@pytest.mark.parametrize("delay", [0.0, 0.3])
async def test_a_grade_that_is_refused_until_its_deadline_is_unknown_and_gives_the_reason(
    delay: float, emulator: Emulator
) -> None:
    async with fleet_bench(emulator) as bench:
        session = await bench.open()
        refused = throttled("execute_verifier", "check_verifier", rate=1.0)
        await emulator.faults(faults=[{**refused, "delay": delay}])
        grade = await graded(bench.gateway, session, 1.0)
        assert (grade.reward, grade.reason, grade.attempts) == (None, NoGradeReason.TIMEOUT, 0)
        assert "429" in grade.detail


@pytest.mark.slow
async def test_a_verifier_here_waits_for_databases_that_are_refused(emulator: Emulator) -> None:
    async with fleet_bench(emulator, verify="local") as bench:
        session = await bench.open()
        await bench.solve(session)
        await emulator.faults(faults=[throttled("query", times=8)])
        grade = await graded(bench.gateway, session)
        assert (grade.reward, grade.attempts) == (1.0, 1)


async def test_no_more_grades_are_under_way_than_the_limit(emulator: Emulator) -> None:
    limits = {"start_grading": 2, "max_grading": 4}
    async with fleet_bench(emulator, section={"limits": limits}) as bench:
        sessions = [await bench.open(attempt) for attempt in range(12)]
        await emulator.faults(faults=[throttled("execute_verifier", rate=0.6)])
        grades = await asyncio.gather(*(graded(bench.gateway, one) for one in sessions))
        assert [grade.reward for grade in grades] == [0.0] * 12
        counted = await emulator.count()
        assert counted["injected"]["execute_verifier 429"] > 0
        assert counted["most_in_flight"]["verifiers"] <= 4


REFUSED = {"status": 429, "body": {"detail": "Rate limit exceeded"}, "retry_after": 1}
MOST_ANSWERS = throttled("execute_verifier", "check_verifier", "get_instance", rate=0.6)
BEYOND_A_RATE = {"on": ["execute_verifier"], "per_second": 3, "reply": REFUSED}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verifier_s", [0.0, 5.0])
@pytest.mark.parametrize(
    "fault",
    [{**MOST_ANSWERS, "reply": REFUSED}, BEYOND_A_RATE],
    ids=["most answers are 429", "3 a second are admitted"],
)
async def test_none_of_200_grades_is_lost_where_fleet_throttles(
    emulator: Emulator, fault: dict[str, Any], verifier_s: float
) -> None:
    """3 a second need 67 s, and the 16 places 63 s at 5 s each."""
    limits = {"max_grading": 16}
    async with fleet_bench(emulator, section={"limits": limits}) as bench:
        opening = (bench.open(attempt, budget_s=600.0) for attempt in range(200))
        sessions = await asyncio.gather(*opening)
        await emulator.faults(faults=[fault], verifier_delay=verifier_s)
        started = time.monotonic()
        grades = await asyncio.gather(*(graded(bench.gateway, one) for one in sessions))
        print(f"{time.monotonic() - started:.1f} s, {(await emulator.count())['injected']}")
        assert [grade.reward for grade in grades] == [0.0] * 200
        counted = await emulator.count()
        assert counted["most_in_flight"]["verifiers"] <= 16
        assert counted["injected"]["execute_verifier 429"] > 38


async def test_warm_ups_keep_to_the_limit_of_calls(emulator: Emulator) -> None:
    section = {"limits": {"start_calls": 2, "max_calls": 8}}
    async with fleet_bench(emulator, section=section) as bench:
        # The endpoints of this environment are known from now on.
        await bench.open()
        slow = {"on": ["initialize"], "delay": 0.1}
        await emulator.faults(faults=[slow])
        await emulator.call("DELETE", "/_emulator/counters")
        await asyncio.gather(*(bench.open(attempt) for attempt in range(1, 41)))
        assert (await emulator.count())["most_in_flight"]["mcp"] <= 8
