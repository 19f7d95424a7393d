"""Cost of a run, and the limits at which it ends. Pure; amounts are US dollars.

A replica costs the price of its machines while it is started. Until its machine is known, the
price of its service's first candidate applies. The ledger keeps a run's accrued cost: a
launcher that takes over the run adds the time since the last entry, and counts nothing
twice. Tokens cost their price at the time they are counted (`token_counts.py`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from flotilla_launcher.config.launcher import LauncherConfig, TokenPrices
from flotilla_launcher.control.token_counts import sum_tokens
from flotilla_launcher.ports import MeterTick, MeterVerdict
from flotilla_launcher.state import Cost, Outcome, Run, TokenCount

# Share of a limit at which people are warned.
WARN_SHARE = 0.8
# The part of a run's cost that is not a service's.
TOKENS = "tokens"
TRAJECTORIES_METRIC = "throughput/trajectories"


class OverBudgetError(ValueError):
    """The run would exceed its cost limit; the message names the key."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """One limit of a run: its use at the last tick, and now."""

    key: str
    outcome: Outcome
    most: float | None
    before: float
    used: float
    form: str

    def __str__(self) -> str:
        return f"{self.form.format(self.used)} of {self.form.format(self.most)}"


def meter_cost(tick: MeterTick) -> MeterVerdict:
    """Add the cost of the elapsed time, and stop the run at a limit. Implements `CostMeter`."""
    cost = accrue_cost(tick.run, tick.prices, tick.cost, tick.passed_s)
    cost = add_tokens(cost, sum_tokens(tick.run.tokens), tick.config.token_prices)
    if tick.run.is_ending:
        return MeterVerdict(cost)
    notes: list[str] = []
    for limit in _list_limits(tick, cost):
        if limit.most is None:
            continue
        if limit.used >= limit.most:
            return MeterVerdict(cost, limit.outcome, f"launcher.{limit.key} is reached: {limit}")
        # Warn once: at the tick that crosses the threshold.
        if limit.before < WARN_SHARE * limit.most <= limit.used:
            notes.append(f"{WARN_SHARE:.0%} of launcher.{limit.key} are used: {limit}")
    return MeterVerdict(cost, None, "; ".join(notes))


def _list_limits(tick: MeterTick, cost: Cost) -> tuple[_Limit, ...]:
    config, before_h = tick.config, (tick.age_s - tick.passed_s) / 3600
    budget = (config.max_cost, tick.cost.accrued, cost.accrued)
    time = (config.max_hours, before_h, tick.age_s / 3600)
    tokens = (config.max_tokens, tick.cost.tokens.total, cost.tokens.total)
    return (
        _Limit("max_cost", Outcome.BUDGET, *budget, "${:,.2f}"),
        _Limit("max_tokens", Outcome.BUDGET, *tokens, "{:,.0f} tokens"),
        _Limit("max_hours", Outcome.DEADLINE, *time, "{:.1f} h"),
    )


def accrue_cost(run: Run, prices: Mapping[str, float], spent: Cost, passed_s: float) -> Cost:
    """Add to `spent` the cost of the started replicas over `passed_s` seconds."""
    by_service = dict(spent.by_service)
    accrued, per_hour = spent.accrued, 0.0
    hours = max(0.0, passed_s) / 3600
    for replica in run.replicas.values():
        if not replica.is_live:
            continue
        price = prices.get(replica.service, 0.0) if replica.price is None else replica.price
        per_hour += price
        accrued += price * hours
        by_service[replica.service] = by_service.get(replica.service, 0.0) + price * hours
    return replace(spent, accrued=accrued, per_hour=per_hour, by_service=by_service)


def add_tokens(spent: Cost, counted: TokenCount, prices: TokenPrices | None) -> Cost:
    """Add to `spent` what the tokens cost that were counted since; nothing without prices."""
    dollars = 0.0 if prices is None else prices.price_tokens(counted.since(spent.tokens))
    by_service = dict(spent.by_service)
    if dollars:
        by_service[TOKENS] = by_service.get(TOKENS, 0.0) + dollars
    return replace(spent, accrued=spent.accrued + dollars, by_service=by_service, tokens=counted)


def crosses_limit(config: LauncherConfig, before: Cost, after: Cost) -> bool:
    """Return whether a limit of dollars or tokens, or the share of it at which people are warned,
    lies between the two costs of a run."""
    uses = (
        (config.max_cost, before.accrued, after.accrued),
        (config.max_tokens, before.tokens.total, after.tokens.total),
    )
    limits = [(most * share, *used) for most, *used in uses if most for share in (WARN_SHARE, 1.0)]
    return any(known < most <= now for most, known, now in limits)


def hourly_cost(prices: Mapping[str, float], replicas: Mapping[str, int]) -> float:
    """Return the cost of an hour with these numbers of replicas by service."""
    return sum(cost_by_service(prices, replicas, 1.0).values())


def cost_by_service(
    prices: Mapping[str, float], replicas: Mapping[str, int], hours: float | None
) -> dict[str, float]:
    """Return the cost of each service's replicas over `hours`; empty without `hours`."""
    if hours is None:
        return {}
    return {
        service: prices[service] * count * hours
        for service, count in replicas.items()
        if prices.get(service)
    }


def check_budget(config: LauncherConfig, prices: Mapping[str, float], cost: Cost) -> None:
    """Refuse a run unless `max_cost` covers its accrued cost and one more hour, and `max_tokens`
    leaves it some.

    Raises OverBudgetError."""
    if config.max_tokens is not None and cost.tokens.total >= config.max_tokens:
        raise OverBudgetError(
            f"launcher.max_tokens: {cost.tokens.total:,} of {config.max_tokens:,} tokens are used;"
            " raise it"
        )
    if config.max_cost is None:
        return
    left = config.max_cost - cost.accrued
    if left <= 0:
        spent = f"${cost.accrued:,.2f} of ${config.max_cost:,.2f} are spent"
        raise OverBudgetError(f"launcher.max_cost: {spent}; raise it")
    replicas = config.replica_counts()
    hourly = hourly_cost(prices, replicas)
    if hourly <= left:
        return
    spent = f", of which ${cost.accrued:,.2f} are spent" if cost.accrued else ""
    raise OverBudgetError(
        f"launcher.max_cost: one hour costs ${hourly:,.2f} ({_format_prices(prices, replicas)});"
        f" the run may cost ${config.max_cost:,.2f}{spent}. Raise it, or request fewer replicas"
        " or cheaper machines"
    )


def cost_metrics(cost: Cost, learner: Mapping[str, float]) -> dict[str, float]:
    """Return `cost/*` for the learner's trackers, computed from its last metrics; empty
    without tokens and without a price."""
    counted = asdict(cost.tokens) if cost.tokens.total else {}
    tokens = {f"cost/tokens_{kind}": float(count) for kind, count in counted.items()}
    if not cost.accrued and not cost.per_hour:
        return tokens
    metrics = {**tokens, "cost/accrued": cost.accrued, "cost/per_hour": cost.per_hour}
    trajectories = learner.get(TRAJECTORIES_METRIC, 0.0)
    if trajectories > 0:
        metrics["cost/per_1000_trajectories"] = 1000 * cost.accrued / trajectories
    return metrics


def _format_prices(prices: Mapping[str, float], replicas: Mapping[str, int]) -> str:
    parts = [
        f"{count} {service} at ${prices[service]:,.2f}"
        for service, count in replicas.items()
        if prices.get(service)
    ]
    return ", ".join(parts) or "no prices"
