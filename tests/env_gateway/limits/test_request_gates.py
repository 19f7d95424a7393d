"""Environments that refuse, fail and vanish: the gateway's demands on them and on itself."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

from flotilla_common.domain.attempts import NoGradeReason, ToolOutcome
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.limits.adaptive_concurrency import AdaptiveLimit
from flotilla_env_gateway.limits.backend_health import RequestObserver, UsualTime
from flotilla_env_gateway.limits.circuit_breaker import BreakerState, CircuitBreaker
from flotilla_env_gateway.limits.request_gates import Gate, NoPlaceError
from flotilla_env_gateway.ports import BackendError, CallAnswer, CallResult
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, task_json
from tests.support.waiting import until

# Enough retries for any fault that a test plants in the environment.
RETRY = {"base_s": 0.001, "cap_s": 0.01, "budget_ratio": 1.0, "budget_cap": 1000.0}


def failure(kind: str = "http", *, delivered: bool | None = False, **more: Any) -> BackendError:
    return BackendError(kind, "on demand", delivered=delivered, **more)


def unreachable() -> BackendError:
    return failure("connect", unreachable=True)


async def call(
    gateway: Gateway, session: Session, name: str = "look", timeout_s: float = 10.0
) -> CallAnswer:
    return (await gateway.call_tool(session, session.episode.next_seq, name, "{}", timeout_s))[0]


def gate(*, limit: int = 2, open_s: float = 5.0) -> Gate:
    breaker = CircuitBreaker(window=4, error_rate=0.5, open_s=open_s)
    usual = UsualTime(at_least_s=1.0, at_most_s=1.0)
    return Gate(AdaptiveLimit(start=limit, ceiling=limit), breaker, observer=RequestObserver(usual))


def now() -> float:
    return asyncio.get_running_loop().time()


async def fail(at: Gate, times: int) -> None:
    for _ in range(times):
        with pytest.raises(BackendError):
            async with at.hold_place("run", now() + 1.0):
                raise failure(delivered=None)


async def test_a_gate_lets_in_as_many_as_the_limit_in_order_of_arrival() -> None:
    entered: list[int] = []
    one = gate(limit=2)

    async def work(number: int) -> None:
        async with one.hold_place("run", now() + 5.0):
            entered.append(number)
            assert one.in_flight <= 2
            await asyncio.sleep(0.001)

    await asyncio.gather(*(work(number) for number in range(20)))
    assert entered == list(range(20))
    assert (one.in_flight, one.waiting) == (0, 0)


async def test_who_gives_up_at_a_gate_leaves_its_place_to_the_next() -> None:
    one = gate(limit=1)
    async with one.hold_place("run", now() + 5.0):
        with pytest.raises(NoPlaceError):
            async with one.hold_place("run", now() + 0.01):
                raise AssertionError("there was no place")
        waiting = asyncio.create_task(_pass(one))
        given_up = asyncio.create_task(_pass(one))
        await asyncio.sleep(0)
        assert one.waiting == 2
        waiting.cancel()
    await given_up
    assert (one.in_flight, one.waiting) == (0, 0)


async def _pass(at: Gate) -> None:
    async with at.hold_place("run", now() + 5.0):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_any_caller_may_be_cancelled_and_no_place_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    one = gate(limit=3, open_s=0.002)

    async def work() -> None:
        async with one.hold_place("run", now() + rng.random() * 0.01):
            await asyncio.sleep(rng.random() * 0.001)
            if rng.random() < 0.4:
                raise failure(rng.choice(["http", "throttled", "timeout"]), delivered=None)

    tasks = [asyncio.create_task(work()) for _ in range(60)]
    for task in rng.sample(tasks, 20):
        await asyncio.sleep(rng.random() * 0.0005)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (one.in_flight, one.waiting) == (0, 0)
    async with one.hold_place("run", now() + 5.0):
        assert one.in_flight == 1


async def test_an_open_breaker_refuses_at_once_who_cannot_wait_for_it() -> None:
    one = gate(open_s=5.0)
    await fail(one, 4)
    assert one.breaker_state is BreakerState.OPEN
    started = now()
    with pytest.raises(BackendError) as caught:
        async with one.hold_place("run", now() + 1.0):
            raise AssertionError("the breaker is open")
    assert now() - started < 0.5
    assert (caught.value.kind, caught.value.delivered) == ("unavailable", False)


async def test_a_breaker_lets_one_try_and_then_all_who_wait() -> None:
    one = gate(limit=8, open_s=0.05)
    await fail(one, 4)
    trying = 0
    together: list[int] = []

    async def work() -> None:
        nonlocal trying
        async with one.hold_place("run", now() + 5.0):
            trying += 1
            together.append(trying)
            await asyncio.sleep(0.01)
            trying -= 1

    await asyncio.gather(*(work() for _ in range(9)))
    assert together[:2] == [1, 1]
    assert max(together) == 8
    assert one.breaker_state is BreakerState.CLOSED


async def test_calls_find_what_an_environment_bears_with_few_refusals() -> None:
    backend = ScriptedBackend()
    refused = 0

    async def hook(name: str, arguments: Mapping[str, Any]) -> CallResult | None:
        nonlocal refused
        if backend.in_flight > 12:
            refused += 1
            raise failure("throttled")
        await asyncio.sleep(0.01)
        return None

    backend.hook = hook
    async with running(backend, retry=RETRY) as gateway:
        sessions = await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(48)))

        async def episode(session: Session) -> list[CallAnswer]:
            return [await call(gateway, session) for _ in range(8)]

        answers = await asyncio.gather(*(episode(session) for session in sessions))
        assert {answer.outcome for made in answers for answer in made} == {ToolOutcome.OK}
        assert refused < 48
        assert 4 <= gateway.caller.gates.call_gate("fake").limit <= 48


async def test_an_environment_that_fails_is_left_alone_and_then_tried_again() -> None:
    backend = ScriptedBackend()
    backend.fail_at("call", *(failure(delivered=None) for _ in range(20)))
    breaker = {"open_s": 0.3}
    async with running(backend, breaker=breaker) as gateway:
        session = await opened(gateway)
        for _ in range(20):
            await call(gateway, session, "add")
        steps = backend.steps["call"]
        refused = await call(gateway, session, timeout_s=0.1)
        assert refused.outcome is ToolOutcome.SESSION_LOST
        assert backend.steps["call"] == steps
        other = await opened(gateway, open_spec(1))
        assert (await call(gateway, other)).outcome is ToolOutcome.OK
        assert gateway.caller.gates.call_gate("fake").breaker_state is BreakerState.CLOSED


async def test_one_environment_that_fails_leaves_the_others_alone() -> None:
    backend = ScriptedBackend()
    backend.fail_at("call", *(failure(delivered=None) for _ in range(20)))
    async with running(backend) as gateway:
        bad = await opened(gateway)
        for _ in range(20):
            await call(gateway, bad, "add", timeout_s=0.5)
        other = open_spec(1, task=task_json(env_id="fake2"))
        assert (await call(gateway, await opened(gateway, other))).outcome is ToolOutcome.OK


async def test_an_instance_out_of_reach_that_is_gone_is_lost_at_once() -> None:
    backend = ScriptedBackend()
    async with running(backend, retry=RETRY) as gateway:
        session = await opened(gateway)
        backend.fail_at("call", *(unreachable() for _ in range(50)))
        backend.running.clear()
        started = now()
        answer = await call(gateway, session, "add", timeout_s=60.0)
        assert (answer.outcome, answer.attempts) == (ToolOutcome.SESSION_LOST, 3)
        assert now() - started < 5.0
        grade = await gateway.grade_episode(session, None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, NoGradeReason.INSTANCE_LOST)


async def test_an_instance_out_of_reach_that_still_runs_is_tried_on() -> None:
    backend = ScriptedBackend()
    async with running(backend, retry=RETRY) as gateway:
        session = await opened(gateway)
        backend.fail_at("call", *(unreachable() for _ in range(7)))
        answer = await call(gateway, session, "add")
        assert (answer.outcome, answer.attempts) == (ToolOutcome.OK, 8)


async def test_failures_that_are_not_in_a_row_are_no_reason_to_query() -> None:
    backend = ScriptedBackend()
    async with running(backend, retry=RETRY) as gateway:
        session = await opened(gateway)
        backend.running.clear()
        for _ in range(3):
            backend.fail_at("call", unreachable(), unreachable())
            assert (await call(gateway, session)).outcome is ToolOutcome.OK


async def test_too_many_instances_is_a_queue_and_not_a_failure() -> None:
    backend = ScriptedBackend()
    backend.fail_at("provision", *(failure("throttled", retry_after_s=0.1) for _ in range(2)))
    async with running(backend, open_timeout_s=0.15) as gateway:
        session = await opened(gateway)
        assert backend.steps["provision"] == 3
        assert session.failure is None


async def test_a_place_that_never_comes_ends_with_the_episode() -> None:
    backend = ScriptedBackend()
    backend.fail_at("provision", *(failure("throttled", retry_after_s=0.05) for _ in range(100)))
    async with running(backend, open_timeout_s=0.05) as gateway:
        spec = open_spec(budget_s=0.4)
        session = gateway.open_episode(spec)
        await until(lambda: session.failure is not None)
        assert "throttled" in (session.failure or "")


async def test_an_episode_that_waits_for_its_turn_until_it_is_over_names_the_refusal_before() -> (
    None
):
    backend = ScriptedBackend()
    backend.fail_at("provision", failure("throttled", retry_after_s=0.01))
    # The next creation may begin when the episode is over.
    limits = {"creates_per_s": 0.1, "creates_burst": 1}
    async with running(backend, limits=limits) as gateway:
        session = gateway.open_episode(open_spec(budget_s=1.0))
        await until(lambda: session.failure is not None)
    assert session.failure == (
        "throttled: on demand; then no_place: the episode waited for its turn until it was over"
    )


async def test_creations_in_flight_grow_with_success_and_fall_when_refused() -> None:
    backend = ScriptedBackend()
    backend.delays["provision"] = 0.002
    creating = {"start_creating": 2, "max_creating": 16}
    async with running(backend, limits=creating) as gateway:
        await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(64)))
        grown = gateway.opener.creations["embedded"].limit
        assert 8 <= grown <= 16
        backend.fail_at("provision", failure("throttled"))
        await opened(gateway, open_spec(64))
        assert gateway.opener.creations["embedded"].limit < grown


async def test_creations_keep_to_their_rate() -> None:
    backend = ScriptedBackend()
    async with running(backend, limits={"creates_per_s": 100.0, "creates_burst": 4}) as gateway:
        started = now()
        await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(24)))
        assert now() - started >= 0.19


async def test_waiting_to_be_created_does_not_use_up_the_time_to_open() -> None:
    backend = ScriptedBackend()
    backend.delays["provision"] = 0.05
    creating = {"start_creating": 1, "max_creating": 1}
    async with running(backend, limits=creating, open_timeout_s=0.15) as gateway:
        sessions = await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(8)))
        assert all(session.failure is None for session in sessions)


async def test_one_grade_does_not_wait_behind_another_runs_many() -> None:
    grader = FakeGrader()
    grader.delay_s = 0.02
    limits = {"start_grading": 1, "max_grading": 1}
    async with running(ScriptedBackend(), grader, limits=limits) as gateway:
        many = [await opened(gateway, open_spec(i)) for i in range(30)]
        one = await opened(gateway, open_spec(0, run_id="other", request_id="other"))
        order: list[str] = []

        async def graded(session: Session) -> None:
            await gateway.grade_episode(session, None, None, 30.0)
            order.append(session.run_id)

        waiting = [asyncio.create_task(graded(session)) for session in many]
        await asyncio.sleep(0)
        await asyncio.gather(graded(one), *waiting)
        assert order.index("other") <= 3
        assert len(grader.seen) == 31
