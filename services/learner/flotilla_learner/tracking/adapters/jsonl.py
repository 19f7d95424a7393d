"""Metrics as JSON lines: one object per point, `step` and `time` among the metric names."""

import math
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.metric_lines import encode_point, parse_points
from flotilla_learner.ports import TrackedRun, Tracker
from flotilla_learner.types import Histogram

# Points at the end of a file that a resumed run may log again.
_REMEMBERED = 64
_TAIL_BYTES = 4 << 20


class JsonlTracker(Tracker):
    """Appends to one file, so that a resumed run continues it.

    Metrics already in the file for a step are not written again; a partial last line, left by a
    kill during a write, is cut off. Histograms are objects {edges, counts}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run_id = ""
        self._known: OrderedDict[int, set[str]] = OrderedDict()
        self._file: TextIO | None = None

    def open_run(self, run: TrackedRun) -> None:
        """Open the file. Raises ConfigError if it is not writable."""
        self._run_id = run.run_id
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f"learner.tracking: cannot write {self._path}: {error.strerror}; make it writable"
            ) from error

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Write one line. Non-finite values become null: JSON has neither NaN nor infinity."""
        point: dict[str, Any] = {
            name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())
        }
        for name, shape in sorted(histograms.items()):
            point[name] = {"edges": shape.edges, "counts": shape.counts}
        file = self._open()
        known = self._known.setdefault(step, set())
        if point.keys() <= known:
            return
        known |= point.keys()
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        owner = {"run_id": self._run_id} if self._run_id else {}
        line = encode_point({"step": step, "time": round(time.time(), 3), **owner, **point})
        file.write(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._known = _cut_torn_line(self._path)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        return self._file


def _cut_torn_line(path: Path) -> OrderedDict[int, set[str]]:
    """Cut off a partial last line; return the metric names of the last points, by step."""
    known: OrderedDict[int, set[str]] = OrderedDict()
    if not path.exists():
        return known
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        tail = file.read()
        whole = tail.rfind(b"\n") + 1
        if whole < len(tail):
            file.truncate(start + whole)
    # The first line may begin before the tail.
    for point in parse_points(tail[:whole].splitlines()[-_REMEMBERED:]):
        known.setdefault(point.pop("step"), set()).update(point)
    return known
