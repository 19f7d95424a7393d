"""What a restored run's files need before a learner of this machine can go on with them."""

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from services.learner.checkpoints.remote_claim import KNOWN_MARKERS, RESTORED
from services.learner.journal.schema import LOST_WITH_DISK


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a run goes on; `lost` acknowledged tries and `lost_steps` are gone, at the least."""

    url: str
    run_id: str
    run_dir: str
    run_epoch: int
    step: int
    lost: int
    lost_steps: int
    # The newest epoch that ever began: the next start is above it.
    newest_epoch: int


def mend_journal(path: Path, restored: Restored, markers: Sequence[str]) -> str | None:
    """Make a journal that of this machine: one checkpoint, no epoch twice, losses counted.

    Returns the name of the checkpoint's folder, None when the journal does not know its step.
    """
    with closing(sqlite3.connect(path)) as db, db:
        query = "SELECT directory FROM checkpoints WHERE step = ?"
        found = db.execute(query, (restored.step,)).fetchone()
        if found is None:
            return None
        name = Path(found[0]).name
        directory = Path(restored.run_dir).resolve() / "checkpoints" / name
        db.execute("DELETE FROM checkpoints WHERE step != ?", (restored.step,))
        db.execute("UPDATE checkpoints SET directory = ?", (str(directory),))
        db.execute(
            "INSERT OR IGNORE INTO epochs SELECT ?, max(step), ? FROM"
            " (SELECT step FROM plans UNION SELECT step FROM checkpoints)",
            (restored.newest_epoch, time.time()),
        )
        before = db.execute("SELECT value FROM meta WHERE key = ?", (LOST_WITH_DISK,)).fetchone()
        lost = restored.lost + (int(json.loads(before[0])) if before else 0)
        facts = {LOST_WITH_DISK: lost, KNOWN_MARKERS: markers, RESTORED: asdict(restored)}
        rows = [(key, json.dumps(value)) for key, value in facts.items()]
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
    return name


def cut_metrics(path: Path, step: int) -> None:
    """Drop lines of later steps, which are made and logged anew, and one that was cut off."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
    path.write_text("".join(kept), encoding="utf-8")


def _step_of(line: str) -> int:
    return int(json.loads(line).get("step", 0))
