"""A run's `metrics.jsonl`: its name, the form of its lines, which those of `alarms.jsonl` have too,
and what of them is lost.

A line names its run and ends with a checksum of itself, so that foreign and damaged ones are
noticed:

    {"step": 3, "time": 1767225600.0, "run_id": "demo-20260101-120000", ..., "crc32": "0badcafe"}"""

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_FILE, ALARMS_FILE = "metrics.jsonl", "alarms.jsonl"
_CHECKSUM = b', "crc32": "'
_MOST_STEPS = 2**53


@dataclass(frozen=True, slots=True)
class LostMetrics:
    """What a metrics file lacks of the steps and evaluations that its run has logged."""

    steps: tuple[int, ...] = ()
    evaluations: tuple[int, ...] = ()
    # Lines that are no points, or differ from what was written.
    damaged: int = 0

    @property
    def count(self) -> int:
        return len(self.steps) + len(self.evaluations) + self.damaged


def encode_point(point: Mapping[str, Any]) -> str:
    """Encode a point as one line, with its checksum."""
    text = json.dumps(point)[:-1]
    return f'{text}{_CHECKSUM.decode()}{zlib.crc32(text.encode()):08x}"}}\n'


def parse_points(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the points of the lines, each with its `step`; skip damaged lines."""
    for line in lines:
        if (point := _parse_point(line)) is not None:
            yield point


def find_lost_metrics(path: Path, logged_step: int, evaluated: Collection[int]) -> LostMetrics:
    """Compare a metrics file with the newest logged step and the evaluated versions. A torn last
    line does not count: a kill leaves it."""
    steps, evaluations, damaged = set[int](), set[int](), 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                point = _parse_point(line)
                if point is None:
                    damaged += line.endswith(b"\n")
                    continue
                found = evaluations if any(name.startswith("eval/") for name in point) else steps
                found.add(point["step"])
    return LostMetrics(
        tuple(step for step in range(1, logged_step + 1) if step not in steps),
        tuple(sorted(set(evaluated) - evaluations)),
        damaged,
    )


def count_damaged_lines(path: Path) -> int:
    """Count the lines that are no points, or differ from what was written; not a torn last one."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") and _parse_point(line) is None for line in file)


def read_tail(path: Path, most_bytes: int) -> list[bytes]:
    """Return the whole lines in the end of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(0, size - most_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return lines[1:-1] if size > most_bytes else lines[:-1]


def _parse_point(line: bytes) -> dict[str, Any] | None:
    body, mark, checksum = line.rstrip().rpartition(_CHECKSUM)
    if mark and checksum != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        point = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = point.get("step") if isinstance(point, dict) else None
    return point if type(step) is int and abs(step) <= _MOST_STEPS else None
