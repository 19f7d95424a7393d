"""Counts what a run costs: while it runs, and over the time in which no launcher ran."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.launcher.config.launcher import LauncherConfig
from services.launcher.ports import Meter, Tick, Verdict
from services.launcher.state import Run

# At the latest after so long, for what is spent while nothing changes.
EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Metering:
    """Asks the meter whenever what costs something changes, and once a minute. `prices` are $/h of
    one replica, `begun` is when the run was started."""

    meter: Meter | None
    config: LauncherConfig
    prices: Mapping[str, float]
    begun: float

    def next_due(self, run: Run) -> float | None:
        """When the run is to be counted although nothing changes: at once when it has used up what
        it may."""
        if self.meter is None:
            return None
        dues = [run.metered + EVERY_S]
        if self.config.max_hours is not None and not run.ending:
            dues.append(self.begun + self.config.max_hours * 3600)
        if self.config.max_cost is not None and run.cost.per_hour > 0 and not run.ending:
            left = self.config.max_cost - run.cost.accrued
            dues.append(run.metered + left / run.cost.per_hour * 3600)
        return min(dues)

    def count(self, before: Run, run: Run, now: float) -> tuple[Run, Verdict | None]:
        """`run` with the cost up to now of what ran `before`; None when it is not time for that."""
        due = self.next_due(before)
        if self.meter is None or due is None:
            return run, None
        if _started(before) == _started(run) and now < due:
            return run, None
        spent = self.meter(self._tick(before, now))
        counted = replace(run, cost=spent.cost, metered=now)
        # What runs from now on has another price per hour.
        rate = self.meter(self._tick(counted, now))
        return replace(counted, cost=rate.cost), spent

    def _tick(self, run: Run, now: float) -> Tick:
        return Tick(
            run=run,
            config=self.config,
            prices=self.prices,
            cost=run.cost,
            passed_s=max(0.0, now - run.metered),
            age_s=now - self.begun,
        )


def _started(run: Run) -> set[object]:
    found = run.replicas.items()
    return {(key, replica.unit, replica.price) for key, replica in found if replica.live}
