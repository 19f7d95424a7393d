"""The control chart of engine against trainer, and what is done about it. No I/O.

                 over a limit            over a limit            over the bound
    WATCH ----------------------> MASK ----------------> ON_POLICY ---------------> STOP
          <---------------------- n healthy versions <----

Two limits. The *bound* belongs to the precision: beyond it no healthy engine computes. The
*limit* is the run's own, an exponentially weighted control chart (Roberts 1959) of the logarithm
of each statistic over healthy versions: mean + k standard deviations, never above the bound and
never below a share of it. Logarithms, because the statistics are positive, skewed, and drift
with the policy's entropy by factors. What is over a limit never moves it.

Only what is over the bound ends a run: a run that has become worse than it was, and is still as
good as its precision allows, is masked and synchronised again, and goes on.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any, Literal

from services.learner.types import VersionMismatch

Statistic = Literal["kl", "tail", "mean"]
# Of fewer tokens, a tail says nothing.
MIN_TOKENS = 32
# Perfect agreement has no logarithm.
_TINY = 1e-12


class Level(IntEnum):
    """What the guard does."""

    WATCH = 0
    # Tokens far off get no gradient.
    MASK = 1
    # All that was sampled is dropped, every engine reloads whole, and sampling begins anew.
    ON_POLICY = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class Bound:
    """What a precision explains, by statistic."""

    mean: float
    tail: float
    kl: float

    def excesses(self, version: int, found: VersionMismatch) -> tuple["Excess", ...]:
        """The statistics of one version that no healthy engine would have."""
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


@dataclass(frozen=True, slots=True)
class Rules:
    """The chart's constants; see `GuardConfig`."""

    bound: Bound
    sigmas: float
    smoothing: float
    warmup_versions: int
    floor: float
    healthy_versions: int


@dataclass(frozen=True, slots=True)
class Excess:
    """One statistic of one version over a limit; `hard` when it is the precision's bound."""

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
class Track:
    """Moving mean and variance of a statistic's logarithm."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def fed(self, value: float, smoothing: float) -> "Track":
        """With one more healthy value. The first ones weigh alike."""
        weight = max(smoothing, 1 / (self.count + 1))
        difference = math.log(max(value, _TINY)) - self.mean
        return Track(
            self.mean + weight * difference,
            (1 - weight) * (self.variance + weight * difference**2),
            self.count + 1,
        )

    def limit(self, bound: float, rules: Rules) -> float:
        """The largest value that the run's history explains."""
        if self.count < rules.warmup_versions:
            return bound
        own = self.mean + rules.sigmas * math.sqrt(self.variance)
        return math.exp(min(math.log(bound), max(math.log(rules.floor * bound), own)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look at the newest samples led to."""

    level: Level
    excesses: tuple[Excess, ...] = ()
    # Entered ON_POLICY just now.
    resync: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A run's state under the guard. Every method returns a new one."""

    kl: Track = Track()
    tail: Track = Track()
    level: Level = Level.WATCH
    healthy: int = 0

    def limits(self, rules: Rules) -> tuple[float, float]:
        """Of the KL and of the tail."""
        return self.kl.limit(rules.bound.kl, rules), self.tail.limit(rules.bound.tail, rules)

    def observe(
        self, found: Mapping[int, VersionMismatch], rules: Rules
    ) -> tuple["Chart", Verdict]:
        """Take in what was measured on samples of one or more versions.

        Versions with too few tokens count as not measured; without any, nothing changes.
        """
        judged = {v: each for v, each in sorted(found.items()) if each.tokens >= MIN_TOKENS}
        if not judged:
            return self, Verdict(self.level)
        excesses = tuple(e for v, each in judged.items() for e in self._excesses(v, each, rules))
        if excesses:
            return self._worse(excesses)
        chart = self
        for each in judged.values():
            chart = replace(
                chart,
                kl=chart.kl.fed(each.kl, rules.smoothing),
                tail=chart.tail.fed(each.abs_diff_tail, rules.smoothing),
            )
        return chart._better(rules)

    def state(self) -> dict[str, Any]:
        """As JSON, for the journal."""
        return {**asdict(self), "level": int(self.level)}

    @staticmethod
    def restored(state: Mapping[str, Any]) -> "Chart":
        """What `state` gave; a new chart for an empty one.

        Never above MASK: this start has loaded every engine anew, and what is over a limit now may
        have been sampled before it, so that it is dropped once more before anything is stopped.
        """
        if not state:
            return Chart()
        kl, tail = Track(**state["kl"]), Track(**state["tail"])
        level = min(Level(state["level"]), Level.MASK)
        return Chart(kl, tail, level, state["healthy"])

    def _excesses(self, version: int, found: VersionMismatch, rules: Rules) -> tuple[Excess, ...]:
        if hard := rules.bound.excesses(version, found):
            return hard
        kl, tail = self.limits(rules)
        pairs: tuple[tuple[Statistic, float, float], ...] = (
            ("kl", found.kl, kl),
            ("tail", found.abs_diff_tail, tail),
        )
        return tuple(
            Excess(version, name, value, limit, hard=False)
            for name, value, limit in pairs
            if not value <= limit
        )

    def _worse(self, excesses: tuple[Excess, ...]) -> tuple["Chart", Verdict]:
        level = self.level
        if level < Level.ON_POLICY:
            level = Level(level + 1)
        elif any(excess.hard for excess in excesses):
            level = Level.STOP
        resync = level is Level.ON_POLICY and self.level is not Level.ON_POLICY
        return replace(self, level=level, healthy=0), Verdict(level, excesses, resync)

    def _better(self, rules: Rules) -> tuple["Chart", Verdict]:
        healthy, level = self.healthy + 1, self.level
        if level and healthy >= rules.healthy_versions:
            healthy, level = 0, Level(level - 1)
        return replace(self, level=level, healthy=healthy), Verdict(level)
