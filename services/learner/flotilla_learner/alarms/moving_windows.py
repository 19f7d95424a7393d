"""Figures over several steps: a single step is mostly noise."""

from collections import deque
from collections.abc import Mapping


class MovingRatio:
    """Share of a whole over at least `window` steps, or more until the whole reaches
    `count`."""

    def __init__(self, window: int, count: int) -> None:
        self._window = window
        self._count = count
        self._steps: deque[tuple[int, int, int]] = deque()
        self.part = 0
        self.whole = 0

    def add_step(self, step: int, part: int, whole: int) -> None:
        self._steps.append((step, part, whole))
        self.part += part
        self.whole += whole
        while len(self._steps) > self._window and self.whole - self._steps[0][2] >= self._count:
            _, part, whole = self._steps.popleft()
            self.part -= part
            self.whole -= whole

    @property
    def since(self) -> int:
        """The oldest step in the window."""
        return self._steps[0][0]

    def __str__(self) -> str:
        return f"{self.part} of {self.whole} ({self.part / self.whole:.0%})"

    @property
    def value(self) -> float | None:
        """The share; None until there is enough data."""
        enough = len(self._steps) >= self._window and self.whole >= self._count
        return self.part / self.whole if enough else None


class MovingMean:
    """Mean of the newest `window` values, and the mean of the run's first ones."""

    def __init__(self, window: int, first: float | None = None) -> None:
        """Create it with `first`, the first mean, if an earlier start of the run found it."""
        self._values: deque[float] = deque(maxlen=window)
        self.first = first

    def add_value(self, value: float) -> None:
        self._values.append(value)
        if self.first is None:
            self.first = self.mean

    @property
    def mean(self) -> float | None:
        """Mean of the window; None until it is full."""
        full = len(self._values) == self._values.maxlen
        return sum(self._values) / len(self._values) if full else None

    @property
    def total(self) -> float:
        """Sum of the newest values, however few there are."""
        return sum(self._values)


class RuleMemory:
    """Moving ratios and means of a set of rules, by name."""

    def __init__(self, window: int, count: int, firsts: Mapping[str, float]) -> None:
        """Create it with `firsts` as an earlier start left them."""
        self._window = window
        self._count = count
        self._ratios: dict[str, MovingRatio] = {}
        self._levels: dict[str, MovingMean] = {}
        self._firsts = dict(firsts)

    @property
    def firsts(self) -> dict[str, float]:
        """Means over the first steps of the run, by name."""
        found = {name: level.first for name, level in self._levels.items()}
        return self._firsts | {n: first for n, first in found.items() if first is not None}

    def update_ratio(self, name: str, step: int, part: int, whole: int) -> MovingRatio:
        """Add a step to the ratio of this name, and return it."""
        ratio = self._ratios.get(name)
        if ratio is None:
            ratio = self._ratios[name] = MovingRatio(self._window, self._count)
        ratio.add_step(step, part, whole)
        return ratio

    def update_mean(self, name: str, value: float) -> MovingMean:
        """Add a value to the mean of this name, and return it."""
        level = self._levels.get(name)
        if level is None:
            level = self._levels[name] = MovingMean(self._window, self._firsts.get(name))
        level.add_value(value)
        return level


# Share of its limit by which a figure must be back within it to clear its alarm.
_MARGIN = 0.2


def too_low(value: float, limit: float) -> bool | None:
    """Return True to raise an alarm, False to clear it, None in between."""
    if value < limit:
        return True
    return False if value >= min(1.0, limit * (1 + _MARGIN)) else None


def too_high(value: float, limit: float) -> bool | None:
    """Return True to raise an alarm, False to clear it, None in between; the limit is a maximum."""
    if value > limit:
        return True
    return False if value <= limit * (1 - _MARGIN) else None
