"""Recovery of runs that have a folder but no entry in the ledger: restored runs, or runs copied
from another machine."""

import json
from pathlib import Path

from services.common.spec.config import ConfigError
from services.common.spec.spec import parse_shared
from services.launcher.state import Run, RunState
from services.launcher.store.ledger import StoredRun
from services.launcher.store.run_files import JOURNAL, RUN_ID_PATTERN, SPEC_FILE


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
