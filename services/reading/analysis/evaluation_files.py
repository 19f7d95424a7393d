"""The evaluations of a run in its dumps, attempt by attempt."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.run_folder import dump_files
from services.reading.analysis.attempt_measures import AttemptMeasures, measure_attempt
from services.reading.analysis.failure_classes import RULES, Rule

_FOLDER = re.compile(r"step_(\d+)(_eval_only)?")


class NothingToAnalyzeError(Exception):
    """The run has no such evaluation; the message gives the reason and the fix."""


@dataclass(frozen=True, slots=True, order=True)
class Evaluation:
    """One dumped evaluation: of version `step`, in the folder `path`."""

    step: int
    path: Path


def list_evaluations(run_dir: Path) -> list[Evaluation]:
    """List the evaluations whose dumps are complete, oldest first."""
    found = run_dir.glob(f"{dump_files.EVALS}/step_*/{dump_files.AGGREGATED}")
    named = ((path.parent, _FOLDER.fullmatch(path.parent.name)) for path in found)
    return sorted(Evaluation(int(match[1]), path) for path, match in named if match)


def choose_evaluation(run_dir: Path, step: int | None) -> Evaluation:
    """Return the evaluation of a step, the newest for None. Raises NothingToAnalyzeError."""
    known = list_evaluations(run_dir)
    if not known:
        raise NothingToAnalyzeError(
            f"run {run_dir.name} has no dumped evaluation in {run_dir / dump_files.EVALS}: it"
            " evaluates with learner.eval, and keeps the episodes with learner.dumps.enabled = true"
        )
    found = [each for each in known if step in (None, each.step)]
    if not found:
        steps = ", ".join(str(each.step) for each in known)
        raise NothingToAnalyzeError(
            f"run {run_dir.name} has no dumped evaluation of step {step}; it has: {steps}"
        )
    return found[-1]


def read_attempts(evaluation: Evaluation, rules: Sequence[Rule] = RULES) -> list[AttemptMeasures]:
    """Measure the attempts of an evaluation; only the last try at each counts."""
    found: dict[tuple[str, int], AttemptMeasures] = {}
    for attempt in _measure_lines(evaluation.path, rules):
        place = (attempt.group_id, attempt.attempt_index)
        if place not in found or found[place].attempt_try < attempt.attempt_try:
            found[place] = attempt
    return list(found.values())


def _measure_lines(folder: Path, rules: Sequence[Rule]) -> Iterator[AttemptMeasures]:
    for path in sorted(folder.glob("*.jsonl")):
        if path.name != dump_files.AGGREGATED:
            with path.open(encoding="utf-8") as file:
                # A line holds all tokens of its attempt: one in memory at a time.
                for line in file:
                    yield measure_attempt(json.loads(line), rules)
