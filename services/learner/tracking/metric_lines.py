"""Lines of `metrics.jsonl`, read back."""

import json
from collections.abc import Iterable, Iterator
from typing import Any


def points(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The points that lines say, each with its `step`; lines that are damaged are left out."""
    for line in lines:
        try:
            point = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(point, dict) and type(point.get("step")) is int:
            yield point
