"""The evaluations of a run in its dumps, attempt by attempt."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder import dump_files
from flotilla_common.text.parsing import refuse_constant
from flotilla_reading.analysis.attempt_facts import Row
from flotilla_reading.analysis.attempt_measures import AttemptMeasures, measure_attempt
from flotilla_reading.analysis.failure_classes import OTHER, RULES, FailureRule, classify

T = TypeVar("T")
NOT_JUDGED: Mapping[AttemptKey, str] = {}
# What damaged lines, and those of other programs, raise when they are read as rows.
_NO_ROW = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class NothingToAnalyzeError(Exception):
    """The run has no such evaluation, or its dumps are damaged; the message gives the reason, and
    the fix if there is one."""


def choose_evaluation(run_dir: Path, step: int | None) -> tuple[int, Path]:
    """Return the version and the folder of an evaluation, the newest for None. Raises
    NothingToAnalyzeError."""
    known = dump_files.find_evaluations(run_dir)
    if not known:
        raise NothingToAnalyzeError(
            f"run {run_dir.name} has no dumped evaluation in {run_dir / dump_files.EVALS}: it"
            " evaluates with learner.eval, and keeps the episodes with learner.dumps.enabled = true"
        )
    found = [each for each in known if step in (None, each[0])]
    if not found:
        steps = ", ".join(str(version) for version, _ in known)
        raise NothingToAnalyzeError(
            f"run {run_dir.name} has no dumped evaluation of step {step}; it has: {steps}"
        )
    return found[-1]


def read_attempts(
    folder: Path,
    rules: Sequence[FailureRule] = RULES,
    judged: Mapping[AttemptKey, str] = NOT_JUDGED,
) -> list[AttemptMeasures]:
    """Measure the attempts in the folder of an evaluation; only the last try at each counts. Those
    that a model has `judged` have its class."""
    found: dict[tuple[str, int], AttemptMeasures] = {}
    for attempt in _read_rows(folder, lambda row: measure_attempt(row, rules)):
        if (said := judged.get(attempt.key, OTHER)) != OTHER:
            attempt = replace(attempt, classes=(said,), judged=True)
        place = (attempt.group_id, attempt.attempt_index)
        if place not in found or found[place].attempt_try < attempt.attempt_try:
            found[place] = attempt
    return list(found.values())


def find_unknown(folder: Path, rules: Sequence[FailureRule] = RULES) -> Iterator[Row]:
    """Yield the rows of graded attempts of which no rule knows why they failed."""

    def is_unknown(row: Row) -> Row | None:
        known = row["reward"] is None or classify(row, rules) != (OTHER,)
        return None if known else row

    return filter(None, _read_rows(folder, is_unknown))


def _read_rows(folder: Path, read: Callable[[Row], T]) -> Iterator[T]:
    """Yield what `read` makes of each row. Raises NothingToAnalyzeError."""
    for path in sorted(folder.glob("*.jsonl")):
        if path.name == dump_files.AGGREGATED:
            continue
        with path.open("rb") as file:
            # A line holds all tokens of its attempt: one in memory at a time.
            for number, line in enumerate(file, start=1):
                try:
                    yield read(json.loads(line, parse_constant=refuse_constant))
                except ConfigError:
                    # Of a user's rule.
                    raise
                except _NO_ROW as error:
                    message = f"{path}: line {number} is no row of an attempt: {error!r}"
                    raise NothingToAnalyzeError(message) from error
