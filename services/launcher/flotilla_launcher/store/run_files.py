"""Names of the files in a run's folder, and what a run is resumed from there."""

import json
import re
from pathlib import Path

from flotilla_common.run_folder.journal_file import JOURNAL_FILE as JOURNAL
from flotilla_common.run_folder.journal_file import LOCK
from flotilla_common.spec.config import ConfigError
from flotilla_common.spec.spec import parse_shared
from flotilla_launcher.state import ReplicaKey, Run, RunState
from flotilla_launcher.store.row_codec import StoredRun

__all__ = [
    "JOURNAL",
    "RUN_ID_PATTERN",
    "SPEC_FILE",
    "describe_missing",
    "log_path",
    "recover_stored_run",
    "write_spec",
]

RUN_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
SPEC_FILE = "spec.json"


def log_path(run_dir: Path, key: ReplicaKey) -> Path:
    """Return the path of a replica's log, which holds its output."""
    return run_dir / "logs" / f"{key[0]}-{key[1]}.log"


def write_spec(run_dir: Path, text: str) -> None:
    """Make the run's folder, and write the spec that it runs with. Raises OSError."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / SPEC_FILE).write_text(text)


def recover_stored_run(runs: Path, run_id: str) -> StoredRun | None:
    """Return a run without an entry in the ledger from its folder, which was restored or copied
    from another machine; None if there is no such run."""
    run_dir = runs / run_id
    if not RUN_ID_PATTERN.fullmatch(run_id) or run_dir.is_symlink():
        return None
    spec, journal = run_dir / SPEC_FILE, run_dir / JOURNAL
    if not (spec.is_file() and journal.is_file()):
        return None
    text = spec.read_text(encoding="utf-8")
    try:
        name = parse_shared(json.loads(text), where=str(spec)).name
    except (ConfigError, ValueError, AttributeError, TypeError):
        return None
    run = Run(run_id=run_id, name=name, wanted={}, state=RunState.STOPPED)
    return StoredRun(run, text, journal.stat().st_mtime, None)


def describe_missing(runs: Path, run_id: str) -> str:
    """Describe the missing files without which a run cannot resume; empty if none is missing.
    A run that ended before its learner began needs none."""
    run_dir = runs / run_id
    if run_dir.is_symlink():
        return f"{run_dir} is a symbolic link: put the run's own folder there"
    if not run_dir.is_dir():
        return f"its folder {run_dir} is gone"
    # The lock exists once a learner has begun; runs resume from the journal.
    if (run_dir / LOCK).exists() and not (run_dir / JOURNAL).exists():
        return f"its journal {run_dir / JOURNAL} is gone (--accept-loss resumes without it)"
    return ""
