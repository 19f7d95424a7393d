"""Recovery of runs whose folder is here though the ledger does not know them: restored, or
copied from another machine. Also the check of runs that the ledger knows though their folder
is gone."""

import json
import re
from pathlib import Path

from services.common.config import ConfigError
from services.common.spec import parse_shared
from services.launcher.plan import SPEC_FILE
from services.launcher.state import Run, RunState
from services.launcher.store.ledger import StoredRun

RUN_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
# The learner's: what a run has once its learner has begun, and what it goes on from.
_LOCK, JOURNAL = "journal.lock", "journal.sqlite"


def recover_stored_run(runs: Path, run_id: str) -> StoredRun | None:
    """Return a run that can be resumed from its folder alone; None if there is no such run."""
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
    """Describe what a run lacks and cannot go on without; empty if it has all. A run that
    was given up before its learner began has nothing to lose."""
    run_dir = runs / run_id
    if run_dir.is_symlink():
        return f"{run_dir} is a link to another folder: put the run's own folder there"
    if not run_dir.is_dir():
        return f"its folder {run_dir} is gone"
    if (run_dir / _LOCK).exists() and not (run_dir / JOURNAL).exists():
        return f"its journal {run_dir / JOURNAL} is gone (--accept-loss goes on without it)"
    return ""
