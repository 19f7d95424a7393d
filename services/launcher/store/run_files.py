"""Names of the files in a run's folder, and the check that a run can resume from them."""

import re
from pathlib import Path

from services.common.run_folder.journal_file import JOURNAL_FILE as JOURNAL
from services.common.run_folder.journal_file import LOCK
from services.launcher.state import ReplicaKey

__all__ = ["JOURNAL", "RUN_ID_PATTERN", "SPEC_FILE", "describe_missing", "log_path", "write_spec"]

RUN_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
SPEC_FILE = "spec.json"


def log_path(run_dir: Path, key: ReplicaKey) -> Path:
    """Return the path of a replica's log, which holds its output."""
    return run_dir / "logs" / f"{key[0]}-{key[1]}.log"


def write_spec(run_dir: Path, text: str) -> None:
    """Make the run's folder, and write the spec that it runs with. Raises OSError."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / SPEC_FILE).write_text(text)


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
