"""Accept the loss of a stopped run's journal, so that the run can resume without the lost part.

Known losses are counted as `lost_with_disk`, and the next start of the run raises an alarm. An
intact journal that is too old is kept; a damaged one is moved to a folder beside it, and a new
one begins at the newest checkpoint. The command prints the losses as one JSON object."""

import argparse
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flotilla_common.files.durable_files import sha256_of, sync_path
from flotilla_common.process.private_process import keep_private
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_common.telemetry import log
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_learner.checkpoints.remote_repair import Restored, cut_metrics, note_loss
from flotilla_learner.journal.checkpoint_tables import put_checkpoint
from flotilla_learner.journal.lost_history import JournalBehindError, LostHistoryError
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.progress_mark import ProgressMark
from flotilla_learner.journal.row_codec import count_fates
from flotilla_learner.journal.run_progress import newest_epoch, replayed_version
from flotilla_learner.journal.schema import LOST_WITH_DISK, CheckpointRow
from flotilla_learner.journal.startup_check import check_journal
from flotilla_learner.journal.store import create_journal, lock_journal, write_and_reseal
from flotilla_learner.run_files.checkpoint_manifest import MANIFEST
from flotilla_learner.run_files.progress_evidence import (
    OrphanCheckpoint,
    newest_trace,
    orphans_after,
)
from flotilla_learner.run_files.run_identity import ForeignRunError

OK, UNABLE = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_learner.checkpoints.accept_loss_command",
        description=__doc__,
        epilog="Exit codes: 0 the run can resume, 2 it cannot.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="folder of the run, as in runs/RUN_ID")
    parser.add_argument("--run-id", help="the run's id, if its folder has another name")
    given = parser.parse_args(argv)
    run_dir: Path = given.run
    log.setup("accept-loss", "")
    if not run_dir.is_dir():
        print_visible(f"error: {run_dir} is not the folder of a run", file=sys.stderr)
        return UNABLE
    try:
        restored = accept_loss(run_dir, given.run_id or "")
    except (JournalError, ForeignRunError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return UNABLE
    print_json({} if restored is None else asdict(restored))
    return OK


def accept_loss(run_dir: Path, run_id: str = "") -> Restored | None:
    """Make the journal of a run usable again; return None if it already is.

    Raises JournalError if a learner works on it, or it has another schema, ForeignRunError if the
    folder has files of another run."""
    run_id = run_id or run_dir.name
    with lock_journal(run_dir):
        try:
            check_journal(run_dir, run_id)
        except LostHistoryError as error:
            return _rebuild_journal(run_dir, run_id, error)
    return None


def _rebuild_journal(run_dir: Path, run_id: str, loss: LostHistoryError) -> Restored:
    path, mark = run_dir / JOURNAL_FILE, ProgressMark(run_dir / MARK)

    def adopt(db: sqlite3.Connection) -> Restored:
        return _adopt_orphans(db, run_dir, run_id, loss)

    # The old mark goes last: a start that is cut off before finds the old state.
    if isinstance(loss, JournalBehindError):
        restored = write_and_reseal(path, mark, adopt)
    else:
        _set_aside(run_dir)
        restored = create_journal(path, mark, run_id, adopt)
    cut_metrics(run_dir / METRICS_FILE, restored.step)
    return restored


def _set_aside(run_dir: Path) -> None:
    """Move the damaged journal to a separate folder, where it can be repaired."""
    number = 1
    while (folder := run_dir / f"damaged-journal-{number}").exists():
        number += 1
    folder.mkdir()
    for name in (f"{JOURNAL_FILE}-wal", f"{JOURNAL_FILE}-shm", JOURNAL_FILE):
        if (run_dir / name).exists():
            (run_dir / name).rename(folder / name)
    sync_path(folder)
    sync_path(run_dir)


def _adopt_orphans(
    db: sqlite3.Connection, run_dir: Path, run_id: str, loss: LostHistoryError
) -> Restored:
    """Add the checkpoints that are missing from the journal, and count the losses."""
    planned = replayed_version(db)
    trace = newest_trace(run_dir, planned)
    orphans = orphans_after(run_dir, planned)
    for orphan in orphans:
        put_checkpoint(db, _orphan_to_row(orphan))
    if orphans:
        _drop_unfinished(db)
    step = replayed_version(db)
    known = max(loss.step, trace.step if trace else 0)
    restored = Restored(
        url=str(run_dir / JOURNAL_FILE),
        run_id=run_id,
        run_dir=str(run_dir),
        run_epoch=loss.run_epoch,
        step=step,
        lost=max(0, loss.acknowledged - count_fates(db)["acknowledged"]),
        lost_steps=max(0, known - step),
        newest_epoch=max(
            [loss.run_epoch, newest_epoch(db), *(o.manifest.run_epoch for o in orphans)]
        ),
    )
    note_loss(db, restored)
    return restored


def _orphan_to_row(orphan: OrphanCheckpoint) -> CheckpointRow:
    files = {name: entry.sha256 for name, entry in orphan.manifest.files.items()}
    files[MANIFEST] = sha256_of(orphan.folder / MANIFEST)
    return CheckpointRow(orphan.manifest.step, str(orphan.folder.resolve()), files)


def _drop_unfinished(db: sqlite3.Connection) -> None:
    """Drop the open groups: any of them may belong to a lost step, and none is trained on twice."""
    db.execute(
        "UPDATE groups SET state = 'dropped', reason = ? WHERE purpose = 'train'"
        " AND (state = 'open' OR state = 'filtered' AND step IS NULL)",
        (LOST_WITH_DISK,),
    )


if __name__ == "__main__":
    keep_private()
    sys.exit(main())
