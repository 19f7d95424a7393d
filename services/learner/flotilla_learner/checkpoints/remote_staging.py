"""Staging of a checkpoint for its upload: links to its files, and a copy of the journal.

Local checkpoints may be removed, and the journal written, while an upload is in progress."""

import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.run_folder.journal_file import SCHEMA_VERSION, connect_journal
from flotilla_learner.checkpoints.remote_layout import JOURNAL, RANK_FOLDER, SPEC, Stamp
from flotilla_learner.journal.run_progress import acknowledged_tries
from flotilla_learner.journal.schema import PRUNE_PICTURES, PRUNE_SCORES, CheckpointRow

FOLDER = "uploads"

# Removes arrays that the checkpoint contains; samples not trained by then are kept.
_STRIP = """
UPDATE trajectories SET payload = NULL WHERE payload IS NOT NULL AND group_id IN (
  SELECT group_id FROM groups
  WHERE state IN ('planned', 'filtered') AND step <= ? OR state IN ('dropped', 'evaluated'))
"""


@dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint that waits for its upload, in a folder of its own."""

    stamp: Stamp
    folder: Path
    schema_version: str
    # Tries that the journal had acknowledged.
    acknowledged: int
    # Committed SHA-256 by name below `folder`; None for files without one.
    files: Mapping[str, str | None]

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Source:
    """Input of staging: a committed checkpoint, and the journal and spec of its run."""

    row: CheckpointRow
    run_dir: Path
    journal: Path
    spec: str


def stage(source: Source, stamp: Stamp, held: Callable[[], None]) -> Staged:
    """Stage a checkpoint. Calls `held` as soon as later changes to its folder or the journal can
    no longer affect it."""
    folder = source.run_dir / FOLDER / str(stamp)
    shutil.rmtree(folder, ignore_errors=True)
    files = _link(Path(source.row.directory), folder / RANK_FOLDER)
    (folder / SPEC).write_text(source.spec, encoding="utf-8")
    acknowledged = snapshot(source.journal, folder / JOURNAL, source.row.step, held)
    # A committed file that is gone must not be forgotten.
    committed = {f"{RANK_FOLDER}/{name}": sha256 for name, sha256 in source.row.files.items()}
    found: dict[str, str | None] = {f"{RANK_FOLDER}/{name}": None for name in files}
    expected = found | committed | {JOURNAL: None, SPEC: None}
    return Staged(stamp, folder, SCHEMA_VERSION, acknowledged, expected)


def snapshot(journal: Path, target: Path, step: int, held: Callable[[], None]) -> int:
    """Copy the journal's current state, without the arrays that the checkpoint of `step` contains.

    Return the number of tries that it had acknowledged. Writers may continue: the copy shows
    the transaction that is open when `held` is called."""
    with closing(connect_journal(journal, read_only=True)) as source, closing(_new(target)) as copy:
        source.execute("BEGIN")
        acknowledged = acknowledged_tries(source)
        held()
        source.backup(copy)
        # One file: the copy has inherited the journal's write-ahead mode.
        copy.execute("PRAGMA journal_mode = DELETE")
        copy.execute(_STRIP, (step,))
        copy.execute(PRUNE_PICTURES)
        copy.execute(PRUNE_SCORES)
        copy.execute("VACUUM")
    return int(acknowledged)


def clear(run_dir: Path) -> None:
    """Remove what an earlier start had staged; the newest checkpoint is offered again."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def _new(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def _link(source: Path, target: Path) -> list[str]:
    """Link all files of a folder, at any depth; copy them where the file system has no
    links."""
    names: list[str] = []
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(source)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target / name)
        except OSError:
            shutil.copyfile(path, target / name)
        names.append(name.as_posix())
    return names
