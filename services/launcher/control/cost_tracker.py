"""Cost tracking of a run, including the time in which no launcher ran."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.launcher.config.launcher import LauncherConfig
from services.launcher.ports import CostMeter, MeterTick, MeterVerdict
from services.launcher.state import Run

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

    def next_count_due(self, run: Run) -> float | None:
        """Return when to count the cost next even if nothing changes: after a minute, or when
        a limit is reached."""
        if self.meter is None:
            return None
        dues = [run.metered + EVERY_S]
        if self.config.max_hours is not None and not run.is_ending:
            dues.append(self.begun + self.config.max_hours * 3600)
        if self.config.max_cost is not None and run.cost.per_hour > 0 and not run.is_ending:
            left = self.config.max_cost - run.cost.accrued
            dues.append(run.metered + left / run.cost.per_hour * 3600)
        return min(dues)

    def count_cost(self, before: Run, run: Run, now: float) -> tuple[Run, MeterVerdict | None]:
        """Return `run` with the cost up to now of the replicas in `before`; the verdict is
        None if counting is not due."""
        due = self.next_count_due(before)
        if self.meter is None or due is None:
            return run, None
        if _priced_replicas(before) == _priced_replicas(run) and now < due:
            return run, None
        spent = self.meter(self._make_tick(before, now))
        counted = replace(run, cost=spent.cost, metered=now)
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
