"""Figures over several steps: one step alone is mostly noise."""

from collections import deque
from collections.abc import Mapping


class Ratio:
    """Part of a whole over at least `window` steps, and more until the whole is `count`."""

    def __init__(self, window: int, count: int) -> None:
        self._window = window
        self._count = count
        self._steps: deque[tuple[int, int, int]] = deque()
        self.part = 0
        self.whole = 0

    def add(self, step: int, part: int, whole: int) -> None:
        self._steps.append((step, part, whole))
        self.part += part
        self.whole += whole
        while len(self._steps) > self._window and self.whole - self._steps[0][2] >= self._count:
            _, part, whole = self._steps.popleft()
            self.part -= part
            self.whole -= whole

    @property
    def since(self) -> int:
        """The oldest step that is counted."""
        return self._steps[0][0]

    def __str__(self) -> str:
        return f"{self.part} of {self.whole} ({self.part / self.whole:.0%})"

    @property
    def value(self) -> float | None:
        """None before there is enough."""
        enough = len(self._steps) >= self._window and self.whole >= self._count
        return self.part / self.whole if enough else None


class Level:
    """The mean of the newest `window` values, and of the first ones of the run."""

    def __init__(self, window: int, first: float | None = None) -> None:
        """`first` is the first mean, where an earlier start of the run found it."""
        self._values: deque[float] = deque(maxlen=window)
        self.first = first

    def add(self, value: float) -> None:
        self._values.append(value)
        if self.first is None:
            self.first = self.mean

    @property
    def mean(self) -> float | None:
        """None before there are as many values as the window is long."""
        full = len(self._values) == self._values.maxlen
        return sum(self._values) / len(self._values) if full else None

    @property
    def total(self) -> float:
        """The sum of the newest values, however few there are."""
        return sum(self._values)


class Memory:
    """The ratios and levels of a set of rules, by name."""

    def __init__(self, window: int, count: int, firsts: Mapping[str, float]) -> None:
        """`firsts` is what `firsts` of an earlier start said."""
        self._window = window
        self._count = count
        self._ratios: dict[str, Ratio] = {}
        self._levels: dict[str, Level] = {}
        self._firsts = dict(firsts)

    @property
    def firsts(self) -> dict[str, float]:
        """Means over the first steps of the run, of all levels."""
        found = {name: level.first for name, level in self._levels.items()}
        return self._firsts | {n: first for n, first in found.items() if first is not None}

    def ratio(self, name: str, step: int, part: int, whole: int) -> Ratio:
        """The ratio of this name, with a step more."""
        ratio = self._ratios.get(name)
        if ratio is None:
            ratio = self._ratios[name] = Ratio(self._window, self._count)
        ratio.add(step, part, whole)
        return ratio

    def level(self, name: str, value: float) -> Level:
        """The level of this name, with a value more."""
        level = self._levels.get(name)
        if level is None:
            level = self._levels[name] = Level(self._window, self._firsts.get(name))
        level.add(value)
        return level


# How far back over its limit a figure has to be, as a share of the limit, to clear its alarm.
_MARGIN = 0.2


def too_low(value: float, limit: float) -> bool | None:
    """Whether to raise (True) or to clear (False); None in between."""
    if value < limit:
        return True
    return False if value >= min(1.0, limit * (1 + _MARGIN)) else None


def too_high(value: float, limit: float) -> bool | None:
    """The same for a limit from above."""
    if value > limit:
        return True
    return False if value <= limit * (1 - _MARGIN) else None
