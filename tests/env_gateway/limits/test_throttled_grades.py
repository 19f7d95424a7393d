"""Grades whose backend refuses most requests (429), in virtual time: none is lost where there is
time, and none waits in vain where there is not."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import BackendError, Execution
from tests.env_gateway.adapters.fleet.virtual_time import in_virtual_time
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running

MANY = 200
LATENCY_S = 0.05
# Grades within so much more time than `queue / rate`.
SLACK = 1.1

Admits = Callable[[float], bool]


def at_random(share: float) -> Admits:
    rng = random.Random(0)
    return lambda now: rng.random() < share


def at_rate(per_s: float, *, saved: float) -> Admits:
    """A server that admits `per_s` a second and saves up to `saved` admissions."""
    tokens, filled_at = saved, 0.0

    def admit(now: float) -> bool:
        nonlocal tokens, filled_at
        tokens, filled_at = min(saved, tokens + (now - filled_at) * per_s), now
        if tokens < 1:
            return False
        tokens -= 1
        return True

    return admit


def in_windows(count: int, seconds: float) -> Admits:
    """A server that admits `count` in each window of so many seconds."""
    admitted: dict[int, int] = {}

    def admit(now: float) -> bool:
        window = int(now / seconds)
        admitted[window] = admitted.get(window, 0) + 1
        return admitted[window] <= count

    return admit


class ThrottlingBackend(ScriptedBackend):
    """Grades itself, in `verifier_s`; refuses what `admits` does not admit."""

    def __init__(
        self, admits: Admits, verifier_s: float, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__()
        self.own_grade = Execution(result=1)
        self.admits = admits
        self.refusals: list[float] = []
        self._verifier_s = verifier_s
        self._retry_after_s = retry_after_s

    async def enter_step(self, name: str) -> None:
        await super().enter_step(name)
        if name != "grade":
            return
        await asyncio.sleep(LATENCY_S)
        now = asyncio.get_running_loop().time()
        if not self.admits(now):
            self.refusals.append(now)
            raise BackendError(
                "throttled", "HTTP 429", delivered=False, retry_after_s=self._retry_after_s
            )
        await asyncio.sleep(self._verifier_s)


def graded(
    backend: ThrottlingBackend,
    deadline_s: float,
    *,
    count: int = MANY,
    late: int = 0,
    at_s: float = 0.0,
    **config: Any,
) -> tuple[list[Grade], list[tuple[float, Grade]]]:
    """Grade `count` episodes together, and `late` more `at_s` seconds later, each with the seconds
    that it took."""

    async def grade(gateway: Gateway, number: int, wait_s: float) -> tuple[float, Grade]:
        session = await opened(gateway, open_spec(number, budget_s=7000.0))
        await asyncio.sleep(wait_s)
        started = asyncio.get_running_loop().time()
        known = await gateway.grade_episode(session, None, None, deadline_s)
        return asyncio.get_running_loop().time() - started, known

    async def work() -> list[tuple[float, Grade]]:
        async with running(backend, lease_ttl_s=7000.0, **config) as gateway:
            waits = [0.0] * count + [at_s] * late
            grades = (grade(gateway, *one) for one in enumerate(waits))
            return list(await asyncio.gather(*grades))

    found = in_virtual_time(work())
    return [one for _, one in found[:count]], found[count:]


@pytest.mark.parametrize("retry_after_s", [None, 1.0])
@pytest.mark.parametrize("verifier_s", [0.02, 1.0, 5.0])
def test_no_grade_is_lost_where_three_of_five_requests_are_refused_at_random(
    verifier_s: float, retry_after_s: float | None
) -> None:
    backend = ThrottlingBackend(at_random(0.4), verifier_s, retry_after_s=retry_after_s)
    # As if none were refused, with the places that there are; and the pauses that are asked for.
    needed_s = MANY / 64 * verifier_s * 2 + 10.0
    grades, _ = graded(backend, needed_s)
    assert [grade.reward for grade in grades] == [1.0] * MANY
    assert {grade.attempts for grade in grades} == {1}
    assert len(backend.refusals) > MANY


@pytest.mark.parametrize(
    ("per_s", "admits", "verifier_s", "retry_after_s"),
    [
        pytest.param(3.0, lambda: at_rate(3.0, saved=3.0), 0.02, None, id="short verifiers"),
        pytest.param(3.0, lambda: at_rate(3.0, saved=3.0), 1.0, None, id="longer ones"),
        pytest.param(3.0, lambda: at_rate(3.0, saved=3.0), 5.0, None, id="long ones"),
        pytest.param(3.0, lambda: at_rate(3.0, saved=30.0), 5.0, None, id="a burst at first"),
        pytest.param(3.0, lambda: in_windows(3, 1.0), 5.0, 1.0, id="three in each second"),
        pytest.param(0.2, lambda: at_rate(0.2, saved=1.0), 1.0, 5.0, id="twelve a minute"),
        pytest.param(20.0, lambda: at_rate(20.0, saved=10.0), 1.0, None, id="twenty a second"),
    ],
)
def test_no_grade_is_lost_to_a_rate_if_its_deadline_allows_for_the_queue(
    per_s: float, admits: Callable[[], Admits], verifier_s: float, retry_after_s: float | None
) -> None:
    backend = ThrottlingBackend(admits(), verifier_s, retry_after_s=retry_after_s)
    grades, _ = graded(backend, SLACK * MANY / per_s + verifier_s)
    assert [grade.reward for grade in grades] == [1.0] * MANY
    assert {grade.attempts for grade in grades} == {1}


def test_a_backend_is_asked_at_a_small_multiple_of_the_rate_that_it_admits() -> None:
    backend = ThrottlingBackend(at_rate(0.1, saved=1.0), 1.0)
    grades, _ = graded(backend, 1300.0, count=100)
    assert [grade.reward for grade in grades] == [1.0] * 100
    settled = [at for at in backend.refusals if at > 100.0]
    assert len(settled) < 4 * 100


def test_a_backend_that_refuses_everything_is_asked_less_and_less() -> None:
    backend = ThrottlingBackend(lambda now: now > 120.0, 0.02)
    grades, _ = graded(backend, 300.0)
    assert [grade.reward for grade in grades] == [1.0] * MANY
    of_last_minute = [at for at in backend.refusals if at > 60.0]
    assert len(of_last_minute) < 120


def test_a_refused_grade_waits_as_long_as_the_backend_says() -> None:
    backend = ThrottlingBackend(lambda now: False, 0.02, retry_after_s=20.0)
    (grade,), _ = graded(backend, 50.0, count=1)
    assert [at - backend.refusals[0] for at in backend.refusals] == pytest.approx(
        [0.0, 20.0 + LATENCY_S, 40.0 + 2 * LATENCY_S]
    )
    assert (grade.reward, grade.reason) == (None, NoGradeReason.TIMEOUT)
    assert "HTTP 429" in grade.detail


def test_a_grade_whose_turn_comes_too_late_is_refused_as_it_enters_the_queue() -> None:
    backend = ThrottlingBackend(at_rate(3.0, saved=3.0), 1.0)
    early, late = graded(backend, 40.0, late=100, at_s=10.0, count=115)
    assert [grade.reward for grade in early] == [1.0] * 115
    # At 10 s there is work for 30 s, so that 30 of the others are graded within their 40 s.
    refused = [grade for seconds, grade in late if grade.reward is None and seconds < 1.0]
    assert 20 < sum(grade.reward == 1.0 for _, grade in late) < 40
    assert len(refused) > 40
    assert {(grade.reason, grade.attempts) for grade in refused} == {(NoGradeReason.TIMEOUT, 0)}
    assert "about 3 a second are admitted, " in refused[0].detail
    # Those that were let in and not reached say so too.
    missed = [grade for seconds, grade in late if grade.reward is None and seconds > 1.0]
    assert all("429" in one.detail or "a second are admitted" in one.detail for one in missed)


def test_an_unknown_rate_refuses_no_grade() -> None:
    """It is not the backend's while the number in flight is what keeps requests waiting."""
    backend = ThrottlingBackend(at_random(0.4), 5.0)
    limits = {"start_grading": 4, "max_grading": 64}
    grades, late = graded(backend, 60.0, late=100, at_s=8.0, count=100, limits=limits)
    assert [grade.reward for grade in [*grades, *(one for _, one in late)]] == [1.0] * 200


def test_an_instance_whose_proof_that_it_runs_is_refused_for_a_minute_is_not_lost() -> None:
    backend = ThrottlingBackend(lambda now: True, 0.02)
    refusal = BackendError("throttled", "HTTP 429", delivered=False, retry_after_s=3.0)
    backend.fail_at("alive", *[refusal] * 20)
    (grade,), _ = graded(backend, 120.0, count=1)
    assert grade.reward == 1.0
    backend.fail_at("alive", *[refusal] * 20)
    (grade,), _ = graded(backend, 40.0, count=1)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.TIMEOUT)
    assert "HTTP 429" in grade.detail
