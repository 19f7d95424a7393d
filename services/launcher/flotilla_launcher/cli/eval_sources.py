"""What the options of `flotilla eval` name: models, and finished evaluations."""

import hashlib
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flotilla_common.files.durable_files import sha256_of
from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_launcher.cli.exported_models import export_run
from flotilla_launcher.cli.run_source import NEWEST, find_run_dir
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.cli.train_report import MODEL_FOLDER
from flotilla_launcher.store.run_files import JOURNAL
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt
from flotilla_reading.evaluation.results_folder import MANIFEST, read_results
from flotilla_reading.evaluation.run_evaluations import read_evaluation

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_AT_STEP = re.compile(r"(?P<run>[^/]+?)(?:@(?P<step>\d+))?")


def find_run(text: str, runs: Path) -> tuple[Path, int | None] | None:
    """Return the folder of the run that `RUN` or `RUN@STEP` names, and the step; None if it names
    none."""
    match = _AT_STEP.fullmatch(text)
    if match is None:
        return None
    run, step = match["run"], int(match["step"]) if match["step"] else None
    if run != NEWEST and not (runs / run / JOURNAL).exists():
        return None
    return find_run_dir(run, runs), step


@contextmanager
def find_model(text: str, runs: Path) -> Generator[str]:
    """Yield what vLLM serves for a model that is no URL: a folder, the model of a run, exported if
    it is not there yet, or a name of the hub. Raises CommandError."""
    is_here = bool(text) and Path(text).exists()
    found = None if is_here else find_run(text, runs)
    if found is None:
        if not (is_here or _HUB_NAME.fullmatch(text)):
            raise CommandError(
                f"{text!r} is no URL (http:// or https://), no folder, no run in {runs} (RUN, or"
                " RUN@STEP), and no name of the hub"
            )
        yield text
        return
    run_dir, step = found
    if step is None and (run_dir / MODEL_FOLDER).is_dir():
        yield str(run_dir / MODEL_FOLDER)
        return
    with scratch_folder() as (scratch, _):
        out = scratch / MODEL_FOLDER
        export_run(run_dir, step, out)
        yield str(out)


def identify_model(served: str) -> str:
    """Return what tells a model from others: its name on the hub, or the digest of its files."""
    folder = Path(served)
    if not folder.is_dir():
        return served
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = [(str(path.relative_to(folder)), sha256_of(path)) for path in files]
    return f"sha256:{hashlib.sha256(json.dumps(listed).encode()).hexdigest()}"


def read_finished(
    text: str, runs: Path
) -> tuple[str, Sequence[EvaluatedAttempt], Mapping[str, str]]:
    """Return the name, the attempts and the known digests of tasks of a finished evaluation: the
    folder of one, `RUN` or `RUN@STEP`. Raises CommandError and EvaluationError."""
    if (Path(text) / MANIFEST).exists():
        settings, attempts = read_results(Path(text))
        return text, attempts, settings.tasks
    found = find_run(text, runs)
    if found is None:
        raise CommandError(
            f"{text} is neither a folder that `flotilla eval --model` wrote nor a run in {runs}"
            " (RUN, or RUN@STEP)"
        )
    evaluation, attempts = read_evaluation(*found)
    return f"{found[0].name}@{evaluation.step}", attempts, {}
