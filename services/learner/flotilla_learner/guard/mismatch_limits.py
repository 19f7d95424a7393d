"""Control chart of engine against trainer, and the measures it triggers. No I/O.

                 over a limit            over a limit            over the bound
    WATCH ----------------------> MASK ----------------> ON_POLICY ---------------> STOP
          <---------------------- n healthy versions <----

Two limits. The *bound* belongs to the precision: no healthy engine computes beyond it. The
*limit* is the run's own, an exponentially weighted control chart (Roberts 1959) of the logarithm
of each statistic over healthy versions: mean + k standard deviations, never above the bound and
never below a share of it. Logarithms, because the statistics are positive, skewed, and drift
with the policy's entropy by factors. Values over a limit never move it.

Only a value over the bound stops a run. A run that has become worse, but is still as good as its
precision allows, is masked and resynchronised, and continues.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, Literal

from flotilla_learner.config.guard import GuardConfig
from flotilla_learner.types import VersionMismatch

Statistic = Literal["kl", "tail", "mean"]
# A tail of fewer tokens is meaningless.
MIN_TOKENS = 32
# Perfect agreement has no logarithm.
_TINY = 1e-12


class GuardLevel(IntEnum):
    """Level of the guard's response."""

    WATCH = 0
    # Tokens far off get no gradient.
    MASK = 1
    # All samples are dropped, every engine reloads whole, and sampling starts over.
    ON_POLICY = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class MismatchBound:
    """Mismatch that a precision explains, by statistic."""

    mean: float
    tail: float
    kl: float

    def find_excesses(self, version: int, found: VersionMismatch) -> tuple["Excess", ...]:
        """Return the statistics of one version that no healthy engine would have."""
        pairs: tuple[tuple[Statistic, float, float], ...] = (
            ("mean", found.abs_diff, self.mean),
            ("tail", found.abs_diff_tail, self.tail),
            ("kl", found.kl, self.kl),
        )
        return tuple(
            Excess(version, name, value, bound, hard=True)
            for name, value, bound in pairs
            if not value <= bound
        )


# Measured in docs/mismatch.md. For bfloat16, 1.7 to 3.6 times the largest difference found between
# a healthy engine and trainer; for float32, where only the order of additions differs, a hundred
# times.
BOUNDS: Mapping[str, MismatchBound] = {
    "float32": MismatchBound(mean=1e-4, tail=1e-3, kl=1e-6),
    "bfloat16": MismatchBound(mean=0.08, tail=0.75, kl=5e-3),
}


def bound_of(config: GuardConfig, dtype: str) -> MismatchBound:
    """Return the bound of a run: its precision's, unless the config sets one."""
    own = BOUNDS[dtype]
    return MismatchBound(
        mean=own.mean if config.mean_bound is None else config.mean_bound,
        tail=own.tail if config.tail_bound is None else config.tail_bound,
        kl=own.kl if config.kl_bound is None else config.kl_bound,
    )


@dataclass(frozen=True, slots=True)
class ChartRules:
    """The chart's constants."""

    bound: MismatchBound
    config: GuardConfig


@dataclass(frozen=True, slots=True)
class Excess:
    """One statistic of one version over a limit; `hard` if it is the precision's bound."""

    version: int
    statistic: Statistic
    value: float
    limit: float
    hard: bool

    def __str__(self) -> str:
        whose = "the bound" if self.hard else "the run's own limit"
        what = f"{self.statistic} of version {self.version}"
        return f"{what} is {self.value:.3g}, {whose} {self.limit:.3g}"


@dataclass(frozen=True, slots=True)
class MovingLogStats:
    """Moving mean and variance of a statistic's logarithm."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def with_value(self, value: float, smoothing: float) -> "MovingLogStats":
        """Return the statistics with one more healthy value. The first ones have equal weight."""
        weight = max(smoothing, 1 / (self.count + 1))
        difference = math.log(max(value, _TINY)) - self.mean
        return MovingLogStats(
            self.mean + weight * difference,
            (1 - weight) * (self.variance + weight * difference**2),
            self.count + 1,
        )

    def upper_limit(self, bound: float, rules: ChartRules) -> float:
        """Return the largest value that the run's history explains."""
        if self.count < rules.config.warmup_versions:
            return bound
        own = self.mean + rules.config.sigmas * math.sqrt(self.variance)
        return math.exp(min(math.log(bound), max(math.log(rules.config.floor * bound), own)))


@dataclass(frozen=True, slots=True)
class ChartVerdict:
    """Judgement of the newest samples."""

    level: GuardLevel
    excesses: tuple[Excess, ...] = ()
    # True if ON_POLICY was entered just now.
    resync: bool = False


@dataclass(frozen=True, slots=True)
class ControlChart:
    """State of a run under the guard. Every method returns a new one."""

    kl: MovingLogStats = MovingLogStats()
    tail: MovingLogStats = MovingLogStats()
    level: GuardLevel = GuardLevel.WATCH
    healthy: int = 0

    def current_limits(self, rules: ChartRules) -> tuple[float, float]:
        """Return the limits on the KL and on the tail."""
        return self.kl.upper_limit(rules.bound.kl, rules), self.tail.upper_limit(
            rules.bound.tail, rules
        )

    def observe_versions(
        self, found: Mapping[int, VersionMismatch], rules: ChartRules
    ) -> tuple["ControlChart", ChartVerdict]:
        """Update the chart with measurements on samples of one or more versions.

        Versions with too few tokens count as not measured; without any, nothing changes.
        """
        judged = {v: each for v, each in sorted(found.items()) if each.tokens >= MIN_TOKENS}
        if not judged:
            return self, ChartVerdict(self.level)
        excesses = tuple(
            e for v, each in judged.items() for e in self._find_excesses(v, each, rules)
        )
        if excesses:
            return self._step_up(excesses)
        chart = self
        for each in judged.values():
            chart = replace(
                chart,
                kl=chart.kl.with_value(each.kl, rules.config.smoothing),
                tail=chart.tail.with_value(each.abs_diff_tail, rules.config.smoothing),
            )
        return chart._step_down(rules)

    def to_state(self) -> dict[str, Any]:
        """Encode as JSON, for the journal."""
        return {**asdict(self), "level": int(self.level)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "ControlChart":
        """Restore the result of `to_state`; an empty one gives a new chart.

        The level is at most MASK: this start has reloaded every engine, and samples over a limit
        may predate it, so they are dropped once more before the run is stopped."""
        if not state:
            return ControlChart()
        kl, tail = MovingLogStats(**state["kl"]), MovingLogStats(**state["tail"])
        level = min(GuardLevel(state["level"]), GuardLevel.MASK)
        return ControlChart(kl, tail, level, state["healthy"])

    def _find_excesses(
        self, version: int, found: VersionMismatch, rules: ChartRules
    ) -> tuple[Excess, ...]:
        if hard := rules.bound.find_excesses(version, found):
            return hard
        kl, tail = self.current_limits(rules)
        pairs: tuple[tuple[Statistic, float, float], ...] = (
            ("kl", found.kl, kl),
            ("tail", found.abs_diff_tail, tail),
        )
        return tuple(
            Excess(version, name, value, limit, hard=False)
            for name, value, limit in pairs
            if not value <= limit
        )

    def _step_up(self, excesses: tuple[Excess, ...]) -> tuple["ControlChart", ChartVerdict]:
        level = self.level
        if level < GuardLevel.ON_POLICY:
            level = GuardLevel(level + 1)
        elif any(excess.hard for excess in excesses):
            level = GuardLevel.STOP
        resync = level is GuardLevel.ON_POLICY and self.level is not GuardLevel.ON_POLICY
        return replace(self, level=level, healthy=0), ChartVerdict(level, excesses, resync)

    def _step_down(self, rules: ChartRules) -> tuple["ControlChart", ChartVerdict]:
        healthy, level = self.healthy + 1, self.level
        if level and healthy >= rules.config.healthy_versions:
            healthy, level = 0, GuardLevel(level - 1)
        return replace(self, level=level, healthy=healthy), ChartVerdict(level)
