"""The run that the files of a run's folder belong to: each names its run, and every start compares
the names, so that a backup restored into the wrong folder is never continued as another run."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.metric_lines import ALARMS_FILE, METRICS_FILE, parse_points
from flotilla_learner.run_files.checkpoint_manifest import MANIFEST

SUMMARY_FILE = "summary.json"
_FILES = (
    *("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "journal.mark", "journal.lock"),
    *(METRICS_FILE, ALARMS_FILE, SUMMARY_FILE),
)
# Written by the launcher alone.
_SPEC = "spec.json"
_FOLDERS = (
    *("", "checkpoints", "logs", "uploads", "model", "stacks", "traces"),
    *("token_stats", "rollouts", "evals"),
)


class ForeignRunError(ConfigError):
    """A file in the run's folder is of another run, or no file that a run writes."""


def check_owner(path: Path, owner: str, run_id: str) -> None:
    """Raise ForeignRunError if a file names another run than the one whose folder it is in."""
    if owner != run_id:
        raise ForeignRunError(
            f"{path} belongs to run {owner}, but this is run {run_id}. Nothing was changed. Put"
            f" the files of run {run_id} back, resume run {owner} in its own folder, or start a"
            " new run"
        )


def check_kinds(run_dir: Path) -> None:
    """Raise ForeignRunError if a file of the run is a folder, a pipe, a link to nothing, or
    closed to this user, or a folder is a file."""
    for name in _FOLDERS:
        _check_kind(run_dir / name, stat.S_ISDIR, "a folder", os.R_OK | os.W_OK | os.X_OK)
    for name in _FILES:
        _check_kind(run_dir / name, stat.S_ISREG, "a regular file", os.R_OK | os.W_OK)
    _check_kind(run_dir / _SPEC, stat.S_ISREG, "a regular file", os.R_OK)


def check_owners(run_dir: Path, run_id: str) -> None:
    """Compare the run that checkpoints, metrics, alarms and summary name. Raises
    ForeignRunError."""
    for path, owner in _named_owners(run_dir):
        check_owner(path, owner, run_id)


def _check_kind(path: Path, fits: Callable[[int], bool], kind: str, access: int) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:
        problem = "is a link to nothing" if path.is_symlink() else ""
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    else:
        problem = "" if fits(found.st_mode) else f"is not {kind}"
        if not problem and not os.access(path, access):
            problem = "is closed to this user"
    if problem:
        raise ForeignRunError(
            f"{path} {problem}. Nothing was changed. Put the run's own back, or start a new run"
        )


def _named_owners(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that names its run. What cannot be read is damage, which others find."""
    for path in sorted(run_dir.glob(f"checkpoints/step-*/{MANIFEST}")):
        yield from _owner_in_json(path)
    yield from _owner_in_json(run_dir / SUMMARY_FILE)
    for name in (METRICS_FILE, ALARMS_FILE):
        path = run_dir / name
        if path.exists():
            with path.open("rb") as file:
                owners = {str(p["run_id"]): None for p in parse_points(file) if "run_id" in p}
            yield from ((path, owner) for owner in owners)


def _owner_in_json(path: Path) -> Iterator[tuple[Path, str]]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(found, dict) and isinstance(found.get("run_id"), str):
        yield path, found["run_id"]
