"""Series of metrics from `metrics.jsonl`, read incrementally."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from flotilla_common.run_folder.metric_lines import parse_points

# Larger files are read only from this far before their end.
_MOST_BYTES = 256 << 20


@dataclass(slots=True)
class Series:
    """Values of one metric by step, in logging order."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))


class MetricSeries:
    """Metrics of one run. Usable from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._inode, self._offset = 0, 0
        self._series: dict[str, Series] = {}

    def names(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        with self._lock:
            self._read_on()
            return sorted(self._series)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric; empty if it was never logged."""
        with self._lock:
            self._read_on()
            found = self._series.get(name) or Series()
            return list(found.steps), list(found.values)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps, in order, and the last value of each: a resumed run repeats steps."""
        values = dict(zip(*self.series(name), strict=True))
        steps = sorted(values)
        return steps, [values[step] for step in steps]

    def at_step(self, names: Sequence[str], steps: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the values of some metrics at some steps, where logged."""
        wanted = set(steps)
        rows: dict[int, dict[str, float]] = {step: {} for step in steps}
        with self._lock:
            self._read_on()
            for name in names:
                found = self._series.get(name) or Series()
                for step, value in zip(found.steps, found.values, strict=True):
                    if step in wanted:
                        rows[step][name] = value
        return rows

    def newest(self) -> dict[str, float]:
        with self._lock:
            self._read_on()
            return {name: each.values[-1] for name, each in self._series.items()}

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                stat = self._path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode = stat.st_ino
                    self._offset = max(0, stat.st_size - _MOST_BYTES)
                    self._series = {}
                file.seek(self._offset)
                data = file.read(stat.st_size - self._offset)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for point in parse_points(data[:whole].split(b"\n")):
            self._add(point)

    def _add(self, point: dict[str, Any]) -> None:
        step = point["step"]
        for name, value in point.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            # Integers of JSON have no limit, and doubles do.
            if name in ("step", "time") or not is_number or not abs(value) <= sys.float_info.max:
                continue
            series = self._series.setdefault(name, Series())
            series.steps.append(step)
            series.values.append(float(value))
