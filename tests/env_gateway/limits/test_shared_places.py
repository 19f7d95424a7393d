"""Places that environments share: what some keep leaves a share to others, and weights hold."""

import asyncio
from collections import Counter

import pytest

from flotilla_common.rpc.deadlines import loop_time
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.limits.adaptive_concurrency import ConcurrencyLimit
from flotilla_env_gateway.limits.request_gates import Gate
from flotilla_env_gateway.limits.shared_places import SharedPlaces
from tests.env_gateway.adapters.fleet.virtual_time import in_virtual_time
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, task_json

PLACES = 256
WEIGHTS = {"one": 1.0, "two": 2.0}


def shared(places: int = PLACES, *, reserved: float = 0.2) -> SharedPlaces:
    return SharedPlaces(
        places, reserved_share=reserved, weight_of=lambda run: WEIGHTS.get(run, 1.0)
    )


def take_all(at: SharedPlaces, env: str, run: str = "run") -> int:
    """Take places until there is none for this holder."""
    taken = 0
    while at.may_take((env, run)):
        at.take_place((env, run))
        taken += 1
    return taken


def test_one_stuck_environment_leaves_the_reserved_share() -> None:
    at = shared()
    assert take_all(at, "stuck") == pytest.approx(0.8 * PLACES, abs=1)
    assert take_all(at, "healthy") == pytest.approx(0.8 * 0.2 * PLACES, abs=1)


def test_each_further_stuck_environment_leaves_a_share_of_the_rest() -> None:
    at = shared()
    for number in range(3):
        assert take_all(at, f"stuck-{number}") > 0
    assert at.may_take(("healthy", "run"))


def test_stuck_environments_whose_calls_end_leave_a_share_however_many_they_are() -> None:
    """Each gets back what it returns only as far as the others' shares allow."""
    at = shared()
    held = {f"stuck-{number}": take_all(at, f"stuck-{number}") for number in range(8)}
    for _ in range(20):
        for env in held:
            for _ in range(held[env]):
                at.give_back((env, "run"))
            held[env] = take_all(at, env)
    assert at.may_take(("healthy", "run"))
    assert max(held.values()) < PLACES / 2


@pytest.mark.parametrize("places", [1, 2, 8])
def test_the_last_place_is_for_a_holder_that_has_none(places: int) -> None:
    at = shared(places)
    assert take_all(at, "stuck", "two") == max(1, places - 1)
    assert at.may_take(("healthy", "run")) is (places > 1)


def test_without_a_reserve_one_holder_may_take_everything() -> None:
    at = shared(8, reserved=0.0)
    assert take_all(at, "stuck") == 8
    at.give_back(("stuck", "run"))
    assert at.may_take(("healthy", "run"))


class Recorder:
    """A gate with one run that always waits."""

    def __init__(self, at: SharedPlaces, name: str, entered: list[str]) -> None:
        self.name = name
        self._at = at
        self._entered = entered
        at.add_gate(self)

    @property
    def waiting(self) -> int:
        return len(self.list_waiting_runs())

    def list_waiting_runs(self) -> list[str]:
        return ["run"]

    def let_in(self) -> bool:
        if not self._at.may_take((self.name, "run")):
            return False
        self._at.take_place((self.name, "run"))
        self._entered.append(self.name)
        return True


def test_a_place_that_is_returned_goes_to_the_gate_that_holds_the_least_and_then_in_turns() -> None:
    at = shared(4)
    for _ in range(3):
        at.take_place(("a", "run"))
    entered: list[str] = []
    for name in "abc":
        Recorder(at, name, entered)
    at.take_place(("other", "run"))
    at.give_back(("a", "run"))
    assert entered == ["b"]
    at.give_back(("a", "run"))
    assert entered == ["b", "c"]
    at.give_back(("b", "run"))
    assert entered == ["b", "c", "b"]


async def work_forever(gate: Gate, run: str, seconds: float, done: Counter[str]) -> None:
    while True:
        async with gate.hold_place(run, loop_time() + 1000.0):
            await asyncio.sleep(seconds)
        done[run] += 1


def count_done(gates: dict[str, Gate], callers: int, until_s: float) -> Counter[str]:
    """Return the calls of each run that end in time, of callers that always make one."""

    async def work() -> Counter[str]:
        done: Counter[str] = Counter()
        tasks = [
            asyncio.create_task(work_forever(gate, run, 0.1 + index % 7 / 100, done))
            for run, gate in gates.items()
            for index in range(callers)
        ]
        await asyncio.sleep(until_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    return in_virtual_time(work())


@pytest.mark.parametrize(
    ("places", "environments"),
    [(8, "the same"), (PLACES, "the same"), (60, "one each"), (PLACES, "one each")],
)
def test_runs_of_weights_one_and_two_get_one_to_two(places: int, environments: str) -> None:
    at = shared(places)

    def gate(name: str) -> Gate:
        return Gate(ConcurrencyLimit(places), shared=at, name=name, weight_of=WEIGHTS.__getitem__)

    both = gate("env")
    gates = {run: both if environments == "the same" else gate(run) for run in WEIGHTS}
    done = count_done(gates, callers=2 * places, until_s=1200.0 / places)
    assert done["two"] / done["one"] == pytest.approx(2.0, rel=0.1)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def times_of_calls(reserved_share: float) -> tuple[list[float], list[float]]:
    """The times of calls in a healthy environment, before and after another holds all it gets."""

    async def call(gateway: Gateway, session: Session, timeout_s: float = 60.0) -> float:
        started = loop_time()
        await gateway.call_tool(session, session.episode.next_seq, "look", "{}", timeout_s)
        return loop_time() - started

    async def call_all(gateway: Gateway, sessions: list[Session]) -> list[float]:
        return list(await asyncio.gather(*(call(gateway, one) for one in sessions)))

    async def work() -> tuple[list[float], list[float]]:
        backend = ScriptedBackend()
        limits = {"start_calls": PLACES, "max_calls": PLACES, "reserved_share": reserved_share}
        async with running(backend, limits=limits, lease_ttl_s=7000.0) as gateway:
            specs = [
                open_spec(
                    i,
                    task=task_json(env_id=env),
                    group_id=env,
                    request_id=f"{env}-{i}",
                    budget_s=600.0,
                )
                for env, count in (("fake", 32), ("fake2", PLACES + 32))
                for i in range(count)
            ]
            sessions = [await opened(gateway, spec) for spec in specs]
            healthy, stuck = sessions[:32], sessions[32:]
            backend.delays["call"] = 0.1
            quiet = await call_all(gateway, healthy)
            backend.delays["call"] = 1000.0
            calls = [asyncio.create_task(call(gateway, one)) for one in stuck]
            await asyncio.sleep(1.0)
            backend.delays["call"] = 0.1
            beside = await call_all(gateway, healthy)
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            return quiet, beside

    return in_virtual_time(work())


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def test_a_stuck_environment_leaves_the_calls_of_another_as_fast_as_before() -> None:
    quiet, beside = times_of_calls(reserved_share=0.2)
    assert p95(beside) <= 2 * p95(quiet)


def test_with_no_share_reserved_they_wait_for_the_stuck_ones() -> None:
    quiet, beside = times_of_calls(reserved_share=0.0)
    assert p95(beside) > 100 * p95(quiet)
