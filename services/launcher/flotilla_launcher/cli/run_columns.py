"""Columns of a list of runs: the newest value of a metric, or a value of the spec. Pure."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.spec.public_spec import redact_spec
from flotilla_common.spec.spec_loading import parse_value
from flotilla_common.spec.spec_values import ABSENT, find_value, format_value, is_equal
from flotilla_launcher.cli.terminal import CommandError


@dataclass(frozen=True, slots=True)
class RunDetails:
    """A run with its spec, without secrets."""

    run: pb.Run
    spec: Mapping[str, Any]

    def find_cell(self, column: str) -> Any:
        """Return the newest value of a metric, or else the spec's value under a key; ABSENT if the
        run has neither."""
        if column in self.run.metrics:
            return self.run.metrics[column]
        return find_value(self.spec, column)

    def cells_to_json(self, columns: Iterable[str]) -> dict[str, Any]:
        return {name: value_to_json(self.find_cell(name)) for name in columns}


def parse_details(run: pb.Run) -> RunDetails:
    return RunDetails(run, redact_spec(json.loads(run.spec_json or "{}")))


def parse_conditions(texts: Iterable[str]) -> Callable[[RunDetails], bool]:
    """Return whether a run's spec fulfils every `KEY=VALUE`. Raises CommandError."""
    wanted: list[tuple[str, str]] = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise CommandError(f"--where {text!r}: write KEY=VALUE, as learner.optimizer.lr=1e-5")
        wanted.append((key, value))

    def fulfils(details: RunDetails) -> bool:
        found = ((find_value(details.spec, key), value) for key, value in wanted)
        return all(have == text or is_equal(have, parse_value(text)) for have, text in found)

    return fulfils


def sort_runs(found: Sequence[RunDetails], column: str) -> list[RunDetails]:
    """Sort by the numbers of a column, the largest first, or the smallest for `-COLUMN`; runs
    without a number come last, in their order."""
    name, sign = column.removeprefix("-"), 1.0 if column.startswith("-") else -1.0

    def place(details: RunDetails) -> tuple[bool, float]:
        value = details.find_cell(name)
        # A NaN equals nothing.
        is_number = isinstance(value, int | float) and value == value
        return (not is_number, sign * value if is_number else 0.0)

    return sorted(found, key=place)


def value_to_json(value: Any) -> Any:
    """Return a cell for JSON: null for what is absent, and for numbers that it cannot express."""
    is_number = isinstance(value, float) and not math.isfinite(value)
    return None if value is ABSENT or is_number else value


def format_cell(value: Any) -> str:
    """Format a number with six digits, and whatever else a spec may have on one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else format_value(value, "-")


def describe_unknown(found: Sequence[RunDetails], columns: Iterable[str]) -> list[str]:
    """Return a hint for each column that none of the runs has, if there are any."""
    metrics = {name for details in found for name in details.run.metrics}
    hints: list[str] = []
    for name in columns:
        if found and all(each.find_cell(name) is ABSENT for each in found):
            close = difflib.get_close_matches(name, metrics, n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/metrics.md names the metrics"
            hints.append(f"none of these runs has the metric or the key {name}; {hint}")
    return hints
