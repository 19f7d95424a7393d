"""Cost tracking of a run, including the time in which no launcher ran."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import budget
from flotilla_launcher.control.token_counts import sum_tokens
from flotilla_launcher.ports import CostMeter, MeterTick, MeterVerdict
from flotilla_launcher.state import Run, TokenCount

# Longest interval between two cost updates.
EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class CostTracker:
    """Cost tracker of a run. It calls the meter whenever the priced replicas change, and once
    a minute. `prices` are $/h of one replica, `begun` is the run's start time."""

    meter: CostMeter | None
    config: LauncherConfig
    prices: Mapping[str, float]
    begun: float

    def next_count_due(self, run: Run, tokens: Mapping[str, TokenCount]) -> float | None:
        """Return when to count the cost next even if nothing changes: after a minute, or when
        a limit is reached. `tokens` are the present counts of the run's processes."""
        if self.meter is None:
            return None
        dues, config = [run.metered + EVERY_S], self.config
        if run.is_ending:
            return dues[0]
        if config.max_hours is not None:
            dues.append(self.begun + config.max_hours * 3600)
        cost = budget.add_tokens(run.cost, sum_tokens(tokens), config.token_prices)
        if budget.crosses_limit(config, run.cost, cost):
            dues.append(run.metered)
        if config.max_cost is not None and cost.per_hour > 0:
            left = config.max_cost - cost.accrued
            dues.append(run.metered + left / cost.per_hour * 3600)
        return min(dues)

    def count_cost(
        self, before: Run, run: Run, now: float, tokens: Mapping[str, TokenCount]
    ) -> tuple[Run, MeterVerdict | None]:
        """Return `run` with the cost up to now of the replicas in `before` and of these tokens of
        its processes; the verdict is None if counting is not due."""
        due = self.next_count_due(before, tokens)
        if self.meter is None or due is None:
            return run, None
        if _priced_replicas(before) == _priced_replicas(run) and now < due:
            return run, None
        spent = self.meter(self._make_tick(replace(before, tokens=tokens), now))
        counted = replace(run, cost=spent.cost, metered=now, tokens=tokens)
        # The changed replicas have another price per hour.
        rate = self.meter(self._make_tick(counted, now))
        return replace(counted, cost=rate.cost), spent

    def _make_tick(self, run: Run, now: float) -> MeterTick:
        return MeterTick(
            run=run,
            config=self.config,
            prices=self.prices,
            cost=run.cost,
            passed_s=max(0.0, now - run.metered),
            age_s=now - self.begun,
        )


def _priced_replicas(run: Run) -> set[object]:
    found = run.replicas.items()
    return {(key, replica.unit, replica.price) for key, replica in found if replica.is_live}
