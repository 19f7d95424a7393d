"""Metrics as JSON lines: one object a step, `step` and `time` among the metric names."""

import json
import math
import time
from pathlib import Path


class JsonlTracker:
    """Appends to one file, so that a resumed run goes on where it was. Implements `Tracker`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line. What is not finite becomes null: JSON knows neither NaN nor infinity."""
        finite = {name: v if math.isfinite(v) else None for name, v in sorted(metrics.items())}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **finite})
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()
