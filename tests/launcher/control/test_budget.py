"""Costs of a run, by a clock that jumps arbitrarily."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_launcher.config.launcher import LauncherConfig, ServiceShape, TokenPrices
from flotilla_launcher.control import budget
from flotilla_launcher.ports import MeterTick, MeterVerdict
from flotilla_launcher.state import Cost, Outcome, Replica, Run, RunState, TokenCount, Unit

SERVICES = ("env_gateway", "learner", "rollout")
PRICES = {"env_gateway": 0.5, "learner": 8.0, "rollout": 2.0}


def run_of(live: dict[str, int], state: RunState = RunState.RUNNING) -> Run:
    """A run with this many started replicas of each service, and one that is not started."""
    found = [
        Replica(service, index, unit=Unit("u"))
        for service, count in live.items()
        for index in range(count)
    ]
    waiting = Replica("rollout", 99)
    run = Run("demo-1", "demo", live, state=state)
    return run.with_replicas([*found, waiting])


def tick(
    passed_s: float,
    *,
    live: dict[str, int] | None = None,
    cost: Cost | None = None,
    age_s: float | None = None,
    state: RunState = RunState.RUNNING,
    **config: float,
) -> MeterTick:
    return MeterTick(
        run=run_of({"learner": 1} if live is None else live, state),
        config=LauncherConfig.model_validate(config),
        prices=PRICES,
        cost=cost or Cost(),
        passed_s=passed_s,
        age_s=passed_s if age_s is None else age_s,
    )


def test_a_started_replica_costs_its_price_for_its_time() -> None:
    verdict = budget.meter_cost(tick(1800.0, live={"learner": 1, "rollout": 2}))
    assert verdict == MeterVerdict(
        Cost(pytest.approx(6.0), 12.0, {"learner": 4.0, "rollout": 2.0})  # pyright: ignore[reportArgumentType]
    )


def test_a_replica_on_machines_that_are_known_costs_what_those_do() -> None:
    known = Replica("rollout", 0, unit=Unit("u"), price=7.0)
    run = run_of({"learner": 1}).with_replicas([known, Replica("rollout", 1, unit=Unit("u"))])
    cost = budget.accrue_cost(run, PRICES, Cost(), 3600.0)
    assert cost == Cost(17.0, 17.0, {"learner": 8.0, "rollout": 9.0})


LIVE = st.fixed_dictionaries({service: st.integers(0, 4) for service in SERVICES})
MOMENTS = st.lists(st.tuples(LIVE, st.floats(0, 10_000)), max_size=12)


def spend(moments: list[tuple[dict[str, int], float]]) -> Cost:
    cost = Cost()
    for live, passed_s in moments:
        cost = budget.meter_cost(tick(passed_s, live=live, cost=cost)).cost
    return cost


@given(MOMENTS)
def test_what_is_accrued_is_price_times_uptime_of_every_replica(
    moments: list[tuple[dict[str, int], float]],
) -> None:
    cost = spend(moments)
    wanted = sum(
        PRICES[service] * count * passed_s / 3600
        for live, passed_s in moments
        for service, count in live.items()
    )
    assert cost.accrued == pytest.approx(wanted)
    assert cost.accrued == pytest.approx(sum(cost.by_service.values()))


@given(MOMENTS, st.integers(1, 5))
def test_it_does_not_matter_how_often_it_is_counted(
    moments: list[tuple[dict[str, int], float]], pieces: int
) -> None:
    """A launcher may die and its successor continue from the ledger: the sum is the same."""
    finer = [(live, passed / pieces) for live, passed in moments for _ in range(pieces)]
    assert spend(finer).accrued == pytest.approx(spend(moments).accrued)


@given(MOMENTS, LIVE, st.floats(-10_000, 10_000))
def test_what_is_accrued_never_falls_not_even_with_a_clock_that_runs_backwards(
    moments: list[tuple[dict[str, int], float]], live: dict[str, int], passed_s: float
) -> None:
    before = spend(moments)
    after = budget.accrue_cost(run_of(live), PRICES, before, passed_s)
    assert after.accrued >= before.accrued
    assert all(after.by_service[name] >= value for name, value in before.by_service.items())


@given(st.lists(st.floats(1, 2_000), max_size=60), st.floats(1, 20))
def test_a_run_is_warned_once_and_stopped_at_the_first_count_over_its_budget(
    lengths: list[float], max_cost: float
) -> None:
    cost, age_s, warnings = Cost(), 0.0, 0
    for passed_s in lengths:
        age_s += passed_s
        verdict = budget.meter_cost(tick(passed_s, cost=cost, age_s=age_s, max_cost=max_cost))
        cost = verdict.cost
        warnings += "80% of launcher.max_cost" in verdict.note
        assert (verdict.stop is Outcome.BUDGET) == (cost.accrued >= max_cost)
        if verdict.stop:
            break
    assert warnings <= 1
    assert warnings == 1 or cost.accrued < 0.8 * max_cost or cost.accrued >= max_cost


def test_a_run_whose_hours_are_over_is_stopped_and_one_that_ends_is_left_alone() -> None:
    late = tick(60.0, age_s=7200.0, max_hours=2.0)
    assert budget.meter_cost(late).stop is Outcome.DEADLINE
    assert "2.0 h of 2.0 h" in budget.meter_cost(late).note
    ending = tick(60.0, age_s=7200.0, max_hours=2.0, state=RunState.DRAINING)
    assert budget.meter_cost(ending) == MeterVerdict(budget.meter_cost(late).cost)


def test_machines_without_a_price_cost_nothing_and_run_for_ever() -> None:
    free = MeterTick(run_of({"learner": 1}), LauncherConfig(max_cost=0.01), {}, Cost(), 1e6, 1e6)
    assert budget.meter_cost(free) == MeterVerdict(Cost(0.0, 0.0, {"learner": 0.0}))
    assert budget.cost_metrics(budget.meter_cost(free).cost, {}) == {}


@pytest.mark.parametrize(
    ("max_cost", "accrued", "starts"),
    [(None, 99.0, True), (12.5, 0.0, True), (12.49, 0.0, False), (20.0, 8.1, False)],
)
def test_a_run_starts_only_if_one_hour_of_it_fits_into_what_is_left(
    max_cost: float | None, accrued: float, starts: bool
) -> None:
    config = LauncherConfig(max_cost=max_cost, rollout=ServiceShape(replicas=2))
    if starts:
        budget.check_budget(config, PRICES, Cost(accrued))
        return
    with pytest.raises(budget.OverBudgetError) as caught:
        budget.check_budget(config, PRICES, Cost(accrued))
    message = str(caught.value)
    assert message.startswith("launcher.max_cost: one hour costs $12.50")
    assert "1 learner at $8.00, 2 rollout at $2.00" in message
    assert ("are spent" in message) == bool(accrued)


def test_a_run_that_has_spent_its_budget_does_not_start_again_even_where_nothing_costs() -> None:
    spent = r"launcher\.max_cost: \$5\.00 of \$5\.00 are spent; raise it$"
    with pytest.raises(budget.OverBudgetError, match=spent):
        budget.check_budget(LauncherConfig(max_cost=5.0), {}, Cost(5.0))


def test_the_maximum_cost_is_listed_by_service_where_there_is_a_price_and_an_end() -> None:
    prices, replicas = {"learner": 2.0, "rollout": 1.5, "env_gateway": 0.0}, {"learner": 1}
    replicas |= {"rollout": 3, "env_gateway": 1}
    assert budget.cost_by_service(prices, replicas, 10.0) == {"learner": 20.0, "rollout": 45.0}
    assert (
        budget.cost_by_service(prices, replicas, None)
        == budget.cost_by_service({}, replicas, 10.0)
        == {}
    )


def test_the_learner_gets_the_cost_of_a_thousand_trajectories() -> None:
    cost = Cost(3.0, 12.0)
    assert budget.cost_metrics(cost, {budget.TRAJECTORIES_METRIC: 600.0}) == {
        "cost/accrued": 3.0,
        "cost/per_hour": 12.0,
        "cost/per_1000_trajectories": 5.0,
    }
    assert "cost/per_1000_trajectories" not in budget.cost_metrics(cost, {})


TOKEN_PRICES = TokenPrices(prompt=0.5, sample=2.0, train=1.5)
USED = TokenCount(4_000_000, 1_000_000, 2_000_000)


def token_tick(cost: Cost, used: TokenCount, **config: Any) -> MeterTick:
    """A tick of no time in which a process has reported these tokens."""
    run = Run("demo-1", "demo", {}, state=RunState.RUNNING, tokens={"process": used})
    return MeterTick(run, LauncherConfig(**config), {}, cost, 0.0, 0.0)


def test_tokens_cost_their_price_beside_machines_and_nothing_without_one() -> None:
    spent = Cost(1.0, 0.0, {"learner": 1.0})
    cost = budget.meter_cost(token_tick(spent, USED, token_prices=TOKEN_PRICES)).cost
    assert cost == Cost(8.0, 0.0, {"learner": 1.0, "tokens": 7.0}, USED)
    assert budget.meter_cost(token_tick(spent, USED)).cost == Cost(1.0, 0.0, {"learner": 1.0}, USED)


def test_tokens_keep_the_price_at_which_they_were_counted() -> None:
    cost = budget.meter_cost(token_tick(Cost(), USED, token_prices=TOKEN_PRICES)).cost
    dearer = TokenPrices(prompt=0.0, sample=10.0, train=0.0)
    more = TokenCount(USED.prompt, USED.sampled + 1_000_000, USED.trained)
    cost = budget.meter_cost(token_tick(cost, more, token_prices=dearer)).cost
    assert cost == Cost(17.0, 0.0, {"tokens": 17.0}, more)


@pytest.mark.parametrize(
    "limit", [{"max_cost": 7.0, "token_prices": TOKEN_PRICES}, {"max_tokens": 7_000_000}]
)
def test_a_run_is_warned_and_stopped_by_its_tokens(limit: dict[str, Any]) -> None:
    (key,) = [key for key in limit if key.startswith("max")]
    near = TokenCount(3_300_000, 800_000, 1_600_000)
    warned = budget.meter_cost(token_tick(Cost(), near, **limit))
    assert warned.stop is None and f"80% of launcher.{key} are used" in warned.note
    verdict = budget.meter_cost(token_tick(warned.cost, USED, **limit))
    assert verdict.stop is Outcome.BUDGET
    assert verdict.note.startswith(f"launcher.{key} is reached: ")
    config = LauncherConfig(**limit)
    assert budget.crosses_limit(config, Cost(), warned.cost)
    assert not budget.crosses_limit(config, warned.cost, warned.cost)
    assert budget.crosses_limit(config, warned.cost, verdict.cost)


def test_a_run_that_has_used_its_tokens_starts_again_only_with_more() -> None:
    spent = Cost(tokens=USED)
    with pytest.raises(budget.OverBudgetError, match=r"7,000,000 of 7,000,000 tokens are used"):
        budget.check_budget(LauncherConfig(max_tokens=7_000_000), {}, spent)
    budget.check_budget(LauncherConfig(max_tokens=7_000_001), {}, spent)


def test_the_learner_gets_the_tokens_and_dollars_only_where_there_are_prices() -> None:
    metrics = budget.cost_metrics(Cost(tokens=USED), {})
    assert metrics == {
        "cost/tokens_prompt": 4e6,
        "cost/tokens_sampled": 1e6,
        "cost/tokens_trained": 2e6,
    }
    assert budget.cost_metrics(Cost(7.0, tokens=USED), {}) == {
        **metrics,
        "cost/accrued": 7.0,
        "cost/per_hour": 0.0,
    }
