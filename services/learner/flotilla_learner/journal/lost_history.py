"""Errors of a journal that holds less than its run has acknowledged."""

from pathlib import Path

from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.progress_mark import Position


class LostHistoryError(JournalError):
    """The run has acknowledged more than its journal holds, or the journal's content has changed.

    `acknowledged` and `run_epoch` are the highest known values of the run."""

    def __init__(self, problem: str, run_dir: Path, known: Position | None, received: int) -> None:
        self.run_epoch = known.run_epoch if known else 0
        self.acknowledged = max(received, known.acknowledged if known else 0)
        self.step = known.step if known else 0
        files = f"{JOURNAL_FILE}, {JOURNAL_FILE}-wal and {MARK}"
        super().__init__(
            f"{problem}\nNothing was changed. Restore {files} from a copy made when the run"
            f" stopped; or accept the loss: flotilla train SPEC --resume {run_dir.name}"
            " --accept-loss counts it as lost_with_disk and resumes from what is intact"
        )


class JournalBehindError(LostHistoryError):
    """The journal is intact but ends too early."""


class DamagedJournalError(LostHistoryError):
    """The journal is missing, or some of its rows differ from what was written."""
