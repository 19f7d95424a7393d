"""What the files of one run have for a report. A file that is missing or damaged is no error: the
report says so, and shows the others."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.files.json_files import read_json_object
from flotilla_common.run_folder.dump_files import ANALYSES
from flotilla_common.run_folder.journal_columns import decode_column
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError, open_read_only
from flotilla_common.run_folder.metric_lines import (
    ALARMS_FILE,
    METRICS_FILE,
    count_damaged_lines,
    parse_points,
)
from flotilla_common.spec.public_spec import redact_spec
from flotilla_common.spec.spec_values import find_value
from flotilla_common.tasks.data_manifest import read_manifest
from flotilla_common.tasks.task_files import TaskFileError
from flotilla_reading.analysis.run_analysis import FORMAT
from flotilla_reading.evaluation.evaluated_attempts import EvaluationError, rewards_by_task
from flotilla_reading.evaluation.run_evaluations import list_evaluations, read_evaluation
from flotilla_reading.metric_series import MetricSeries

# By task; attempts without a grade have none.
Rewards = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class ReportedEval:
    """One evaluation of the policy after so many optimizer steps, by set; see
    `eval_report.summarize_results` of the learner."""

    step: int
    results: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run. `about` is what its launcher knows, by names for people; `problems` are sentences
    about what is missing or damaged."""

    run_id: str
    about: Mapping[str, str]
    spec: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: MetricSeries
    evals: Sequence[ReportedEval]
    # Of its first and newest evaluation on the main set, by step.
    rewards: Mapping[int, Rewards]
    alarms: Sequence[Mapping[str, Any]]
    # The manifest of its data, if it names one.
    manifest: Mapping[str, Any]
    # Every Flotilla that wrote its journal, and how often its learner has started.
    writers: Sequence[Mapping[str, str]]
    starts: int
    # The newest analysis, as `flotilla analyze` writes it; empty without one.
    analysis: Mapping[str, Any]
    problems: Sequence[str]


def read_run(folder: Path, about: Mapping[str, str]) -> ReportedRun:
    """Read the folder of a run."""
    problems: list[str] = []
    spec = redact_spec(_read_object(folder / "spec.json", problems))
    problems += _describe_metrics(folder / METRICS_FILE)
    journal = _read_journal(folder / JOURNAL_FILE, problems)
    alarms = folder / ALARMS_FILE
    return ReportedRun(
        run_id=folder.name,
        about=about,
        spec=spec,
        summary=_read_object(folder / "summary.json", problems),
        metrics=MetricSeries(folder / METRICS_FILE),
        evals=journal.get("evals", []),
        rewards=_read_rewards(folder, problems) if journal else {},
        alarms=list(parse_points(alarms.read_bytes().split(b"\n"))) if alarms.exists() else [],
        manifest=_read_manifest(find_value(spec, "learner.data"), problems),
        writers=journal.get("writers", []),
        starts=journal.get("starts", 0),
        analysis=_read_analysis(folder / ANALYSES / "newest.json", problems),
        problems=problems,
    )


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.exists():
        problems.append(f"There is no {path.name}.")
        return {}
    try:
        return read_json_object(path)
    except ValueError as error:
        problems.append(f"{path.name} is damaged: {error}.")
        return {}


def _describe_metrics(path: Path) -> Iterator[str]:
    if not path.exists():
        yield f"There is no {path.name}: the run ended before its first step and evaluation."
        return
    if damaged := count_damaged_lines(path):
        yield f"{path.name} has {damaged} damaged lines, which are left out."
    with path.open("rb") as file:
        last = b"".join(deque(file, 1))
    if last and not last.endswith(b"\n"):
        yield f"The last line of {path.name} is cut off, and left out."


def _read_journal(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.exists():
        problems.append("There is no journal: the run's learner never began.")
        return {}
    try:
        with open_read_only(path) as db:
            evals = db.execute("SELECT version, results FROM evals ORDER BY version, rowid")
            meta = db.execute("SELECT value FROM meta WHERE key = 'written_by'").fetchone()
            writers = "written_by in the table meta"
            return {
                "evals": [_to_eval(*row) for row in evals],
                "starts": db.execute("SELECT count(*) FROM epochs").fetchone()[0],
                "writers": decode_column(meta[0], list[dict[str, str]], writers) if meta else [],
            }
    except JournalError as error:
        problems.append(f"{error}.")
    return {}


def _to_eval(step: int, results: str) -> ReportedEval:
    where = f"the results of the evaluation of step {step}"
    return ReportedEval(step, decode_column(results, dict[str, Any], where))


def _read_rewards(folder: Path, problems: list[str]) -> dict[int, Rewards]:
    """Read the first and the newest evaluation."""
    found: dict[int, Rewards] = {}
    try:
        steps = [each.step for each in list_evaluations(folder)]
        for step in sorted({*steps[:1], *steps[-1:]}):
            found[step] = rewards_by_task(read_evaluation(folder, step)[1])
    except EvaluationError as error:
        problems.append(f"Tasks cannot be compared: {error}.")
    return found


def _read_analysis(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read the newest analysis; nothing if there is none."""
    found = _read_object(path, problems) if path.exists() else {}
    if found and found.get("format") != FORMAT:
        problems.append(
            f"Its analysis has format {found.get('format')}, and this Flotilla reads {FORMAT}:"
            " `flotilla analyze` writes it again."
        )
        return {}
    return found


def _read_manifest(name: Any, problems: list[str]) -> dict[str, Any]:
    """Read the manifest that a spec names; nothing if it names none."""
    if not isinstance(name, str):
        return {}
    try:
        return read_manifest(Path(name))
    except TaskFileError as error:
        problems.append(f"The manifest of its data is not here now: {error}.")
        return {}
