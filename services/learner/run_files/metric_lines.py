"""A run's `metrics.jsonl`: its name, and the parser for its lines."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

METRICS_FILE = "metrics.jsonl"


def parse_points(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the points of the lines, each with its `step`; skip damaged lines."""
    for line in lines:
        try:
            point = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(point, dict) and type(point.get("step")) is int:
            yield point
