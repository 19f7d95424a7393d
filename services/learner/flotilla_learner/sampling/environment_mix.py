"""Mixture of environments: number and order of each one's groups in every step-sized window of
draws.

Stateless: a function of the seed, the sizes of the environments and the number of the window."""

import random
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from math import sqrt

from flotilla_learner.config.sampling import SamplingConfig

# Fractional part of the golden ratio: its multiples fill the unit interval most evenly.
_GOLDEN = (sqrt(5) - 1) / 2
# Error allowed in float sums of rates that should be whole.
_ROUNDING = 1e-9


class MixtureError(ValueError):
    """The environments of the task file cannot be mixed as configured."""


class EnvironmentMix:
    """Environments in windows of `window` draws; raises MixtureError if they do not fit."""

    def __init__(
        self, sizes: Mapping[str, int], config: SamplingConfig, *, window: int, seed: int
    ) -> None:
        self._names = sorted(sizes)
        self._window = window
        self._least = config.min_per_env
        if self._least * len(sizes) > window:
            raise MixtureError(
                f"learner.sampling.min_per_env is {self._least}, which for {len(sizes)}"
                f" environments is more than learner.groups_per_step, {window}"
            )
        self.rates = _window_rates(_resolve_weights(sizes, config), window, self._least)
        self._edges = list(accumulate(self.rates[name] - self._least for name in self._names))
        self._phase = random.Random(f"{seed}/mixture").random()

    def window_counts(self, number: int) -> list[int]:
        """Count the groups of each environment, by name, in the `number`-th window.

        Beyond its minimum, each gets the points u, u + 1, u + 2, ... that fall into its stretch
        of the line on which the environments lie side by side, each as long as its rate
        (systematic sampling). u runs through multiples of the golden ratio, so that the sum
        over w windows differs from w times the rate by O(log w)."""
        counts = [self._least] * len(self._names)
        first = (self._phase + number * _GOLDEN) % 1.0
        for point in range(self._window - self._least * len(self._names)):
            place = bisect_right(self._edges, first + point + _ROUNDING)
            counts[min(place, self._last_index)] += 1
        return counts

    def window_order(self, number: int) -> list[str]:
        """Return the window's environments draw by draw: each spread evenly over the window."""
        counts = self.window_counts(number)
        places = [
            ((turn + 0.5) / count, index)
            for index, count in enumerate(counts)
            for turn in range(count)
        ]
        return [self._names[index] for _, index in sorted(places)]

    @property
    def _last_index(self) -> int:
        """Index of the last environment that has a stretch of the line."""
        return max(i for i, name in enumerate(self._names) if self.rates[name] > self._least)


def _resolve_weights(sizes: Mapping[str, int], config: SamplingConfig) -> dict[str, float]:
    if config.mixing == "uniform":
        return dict.fromkeys(sizes, 1.0)
    if config.mixing == "proportional":
        return {name: float(size) for name, size in sizes.items()}
    unknown, missing = sorted(config.weights.keys() - sizes), sorted(sizes - config.weights.keys())
    if unknown:
        raise MixtureError(
            f"learner.sampling.weights names {', '.join(unknown)}, but learner.tasks"
            f" has only {', '.join(sorted(sizes))}"
        )
    if missing:
        raise MixtureError(
            f"learner.sampling.weights lacks {', '.join(missing)}; 0 leaves an environment out"
        )
    return dict(config.weights)


def _window_rates(weights: Mapping[str, float], window: int, least: int) -> dict[str, float]:
    """Return expected groups of a window: proportional to the weights, at least `least` each.

    If the minimum exceeds an environment's share by weight, the others divide the rest in
    proportion to theirs."""
    floored: set[str] = set()
    while True:
        free = {name: weight for name, weight in weights.items() if name not in floored}
        left = window - least * len(floored)
        unit = left / sum(free.values()) if any(free.values()) else 0.0
        below = {name for name, weight in free.items() if unit * weight < least}
        if not below:
            return {
                name: float(least) if name in floored else unit * w for name, w in weights.items()
            }
        floored |= below
