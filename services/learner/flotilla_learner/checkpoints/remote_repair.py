"""Repairs to a restored run's files, before a learner on this machine can resume it."""

import json
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from flotilla_common.files.durable_files import write_durably
from flotilla_common.run_folder.journal_file import connect_journal
from flotilla_common.run_folder.metric_lines import parse_points
from flotilla_learner.checkpoints.remote_claim import KNOWN_MARKERS, RESTORED
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.progress_mark import ProgressMark
from flotilla_learner.journal.run_progress import lost_tries, planned_step
from flotilla_learner.journal.schema import LOST_WITH_DISK
from flotilla_learner.journal.store import write_and_reseal
from flotilla_learner.run_files.checkpoint_manifest import check_relative_name


@dataclass(frozen=True, slots=True)
class Restored:
    """Point from which a run resumes; at least `lost` acknowledged tries and `lost_steps` are
    gone."""

    url: str
    run_id: str
    run_dir: str
    run_epoch: int
    step: int
    lost: int
    lost_steps: int
    # Newest epoch that ever began: the next start is above it.
    newest_epoch: int


@dataclass(frozen=True, slots=True)
class JournaledSteps:
    """Steps of a journal beyond its checkpoint: the journal was copied when the checkpoint was
    written, and training had continued meanwhile."""

    planned: int
    # Last step whose metrics are logged; they are not logged again.
    logged: int


def read_steps(path: Path) -> JournaledSteps:
    """Read the last steps in a restored journal. Raises sqlite3.Error, ValueError."""
    with closing(connect_journal(path, read_only=True)) as db:
        planned = planned_step(db)
        tracker = db.execute("SELECT value FROM meta WHERE key = 'tracker'").fetchone()
    return JournaledSteps(planned, int(json.loads(tracker[0])["step"]) if tracker else 0)


def mend_journal(path: Path, restored: Restored, markers: Sequence[str]) -> str | None:
    """Adapt a journal to this machine: one checkpoint, no epoch used twice, losses counted.

    Returns the name of the checkpoint's folder, None if the journal does not know its step."""
    mark = ProgressMark(path.with_name(MARK))
    return write_and_reseal(path, mark, lambda db: _mend(db, restored, markers))


def note_loss(db: sqlite3.Connection, restored: Restored) -> None:
    """Count the loss, and have the next start report it, in an epoch above every earlier
    one."""
    db.execute(
        "INSERT OR IGNORE INTO epochs SELECT ?, coalesce(max(step), 0), ? FROM"
        " (SELECT step FROM plans UNION SELECT step FROM checkpoints)",
        (restored.newest_epoch, time.time()),
    )
    lost = restored.lost + lost_tries(db)
    put_meta(db, {LOST_WITH_DISK: lost, RESTORED: asdict(restored)})


def put_meta(db: sqlite3.Connection, values: Mapping[str, object]) -> None:
    rows = [(key, json.dumps(value)) for key, value in values.items()]
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)


def _mend(db: sqlite3.Connection, restored: Restored, markers: Sequence[str]) -> str | None:
    query = "SELECT directory FROM checkpoints WHERE step = ?"
    found = db.execute(query, (restored.step,)).fetchone()
    if found is None:
        return None
    name = check_relative_name(Path(found[0]).name)
    directory = Path(restored.run_dir).resolve() / "checkpoints" / name
    db.execute("DELETE FROM checkpoints WHERE step != ?", (restored.step,))
    db.execute("UPDATE checkpoints SET directory = ?", (str(directory),))
    note_loss(db, restored)
    put_meta(db, {KNOWN_MARKERS: markers})
    return name


def cut_metrics(path: Path, step: int) -> None:
    """Drop malformed lines and those of later steps, which will be logged again."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    whole = (line for line in lines if line.endswith(b"\n"))
    kept = [line for line in whole if any(p["step"] <= step for p in parse_points([line]))]
    partial = path.with_name(f"{path.name}.partial")
    write_durably(partial, b"".join(kept))
    os.replace(partial, path)
