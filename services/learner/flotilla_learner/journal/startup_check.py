"""Check of a stopped run's journal for completeness, before a learner resumes the run.

Nothing is written: SQLite opens the file read-only, so that a damaged write-ahead log can still
be repaired."""

import sqlite3
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.journal_file import (
    JOURNAL_FILE,
    SCHEMA_VERSION,
    JournalError,
    check_schema,
    connect_journal,
    schema_version,
)
from flotilla_common.run_folder.record_digests import CORRUPT
from flotilla_common.run_folder.trajectory_tables import damaged_rows
from flotilla_learner.journal.consistency import find_contradictions, missing_attempts
from flotilla_learner.journal.lost_history import DamagedJournalError, JournalBehindError
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.progress_mark import Position, ProgressMark
from flotilla_learner.journal.run_progress import owner_of
from flotilla_learner.journal.table_checksums import (
    BrokenSealError,
    current_position,
    load_seal,
    sum_table,
)
from flotilla_learner.run_files import progress_evidence
from flotilla_learner.run_files.run_identity import check_owner, check_owners

# Time for reading and comparing at a start; the rest is compared when it is used.
LIMIT_S = 60.0
_STEPS_BETWEEN_LOOKS = 1000
_NAMED = 5


@dataclass(slots=True)
class CheckedJournal:
    """A journal that can be resumed."""

    # None if there is no journal yet.
    position: Position | None = None
    # Trajectories to quarantine.
    damaged: list[AttemptKey] = field(default_factory=list[AttemptKey])
    # True if the mark must be recreated; then the problem with it, if any.
    new_mark: bool = False
    bad_mark: str = ""
    # True if it is of an earlier format.
    former: bool = False
    # True if the time ran out before everything was compared.
    cut_short: bool = False


def check_journal(run_dir: Path, run_id: str, limit_s: float = LIMIT_S) -> CheckedJournal:
    """Check the journal of a run against its mark, its other files and itself.

    Raises JournalBehindError, DamagedJournalError; JournalError for a journal of another
    schema; ForeignRunError for a file of another run."""
    path, mark = run_dir / JOURNAL_FILE, ProgressMark(run_dir / MARK)
    known = mark.read_position()
    _check_owners(run_dir, run_id, known)
    if not path.exists():
        return _expect_no_run(run_dir, known, f"{path} is gone")
    if not path.stat().st_size:
        return _expect_no_run(run_dir, known, f"{path} is empty")
    try:
        with closing(connect_journal(path, read_only=True)) as db:
            version = schema_version(db)
            check_schema(path, version)
            if version is None:
                # The process that created it was killed, or the file lost everything.
                return _expect_no_run(run_dir, known, f"{path} is empty")
            found = _JournalCheck(run_dir, db, known).run_checks(limit_s)
            found.former = version != SCHEMA_VERSION
            return found
    except (sqlite3.DatabaseError, BrokenSealError) as error:
        raise DamagedJournalError(
            f"{path} is not a journal, or damaged: {error}", run_dir, known, 0
        ) from None


def _check_owners(run_dir: Path, run_id: str, known: Position | None) -> None:
    """Compare the runs that all files of the folder name, the journal's first. Raises
    ForeignRunError."""
    owner = ""
    # What cannot be read is damage, which the checks of the journal's content report.
    with suppress(sqlite3.DatabaseError, ValueError, FileNotFoundError):
        owner = _owner_of_file(run_dir / JOURNAL_FILE)
    if owner:
        check_owner(run_dir / JOURNAL_FILE, owner, run_id)
    if known is not None:
        check_owner(run_dir / MARK, known.run_id, run_id)
    check_owners(run_dir, run_id)


def _owner_of_file(path: Path) -> str:
    # SQLite would remove the log of an empty journal.
    if not path.stat().st_size:
        return ""
    with closing(connect_journal(path, read_only=True)) as db:
        return owner_of(db)


def _expect_no_run(run_dir: Path, known: Position | None, problem: str) -> CheckedJournal:
    """Return an empty result for a new run; raise if the run has already begun."""
    if known is not None and known.commits:
        raise DamagedJournalError(
            f"{problem}, but {run_dir / MARK} records {_describe_extent(known)}",
            run_dir,
            known,
            0,
        )
    if trace := progress_evidence.newest_trace(run_dir, 0):
        raise DamagedJournalError(
            f"{problem}, but {trace.path} is from step {trace.step}",
            run_dir,
            None,
            trace.acknowledged,
        )
    return CheckedJournal()


class _JournalCheck:
    """Comparison of one readable journal with its mark, its other files and itself."""

    def __init__(self, run_dir: Path, db: sqlite3.Connection, known: Position | None) -> None:
        self._run_dir = run_dir
        self._path = run_dir / JOURNAL_FILE
        self._db = db
        self._known = known
        self._seal = load_seal(db)
        self._found = CheckedJournal(current_position(db, self._seal))

    def run_checks(self, limit_s: float) -> CheckedJournal:
        with _limit_time(self._db, limit_s) as late:
            try:
                self._check_content()
            except sqlite3.OperationalError:
                if not late():
                    raise
                self._found.cut_short = True
        self._check_against_mark()
        self._check_against_files()
        return self._found

    def _check_against_mark(self) -> None:
        mark, known, found = self._run_dir / MARK, self._known, self._position
        if known is None:
            self._found.new_mark = True
            # A kill may precede the first mark; after the first commit there is one.
            if found.commits:
                self._found.bad_mark = f"{mark} is {'damaged' if mark.exists() else 'gone'}"
            return
        if known.journal != found.journal:
            raise DamagedJournalError(
                f"{mark} belongs to another journal than {self._path}", self._run_dir, known, 0
            )
        if found.commits < known.commits:
            raise self._behind_error(known)
        ahead = found.commits - known.commits
        if ahead > 1:
            self._found.new_mark = True
            self._found.bad_mark = f"{mark} is outdated, {ahead} commits behind its journal"
        elif known.chain != (self._seal.before if ahead else self._seal.chain):
            raise JournalBehindError(
                f"{self._path} is not the journal of {mark}: their commits differ,"
                f" {known.commits} at the latest",
                *(self._run_dir, known, found.acknowledged),
            )

    def _check_against_files(self) -> None:
        trace = progress_evidence.newest_trace(self._run_dir, self._position.step)
        if trace is None:
            return
        raise JournalBehindError(
            f"{self._path} (with {JOURNAL_FILE}-wal) ends at step {self._position.step}, but"
            f" {trace.path} is from step {trace.step}",
            self._run_dir,
            self._known,
            trace.acknowledged,
        )

    def _behind_error(self, known: Position) -> JournalBehindError:
        found = self._position
        return JournalBehindError(
            f"{self._path}-wal was removed, cut or damaged: {self._path} ends at commit"
            f" {found.commits} with {_describe_extent(found)}; {self._run_dir / MARK} records"
            f" {known.commits} commits with {_describe_extent(known)}",
            *(self._run_dir, known, found.acknowledged),
        )

    def _check_content(self) -> None:
        """Compare every row with its digests, its table's total and the other tables; check every
        page."""
        damaged = damaged_rows(self._db)
        if problems := self._find_problems(unclear=bool(damaged)):
            raise DamagedJournalError(
                f"{self._path} is damaged: {'; '.join(problems[:_NAMED])}",
                *(self._run_dir, self._known, self._position.acknowledged),
            )
        self._found.damaged = _not_in_quarantine(self._db, damaged)

    def _find_problems(self, *, unclear: bool) -> list[str]:
        try:
            found = [
                *self._compare_totals(unclear=unclear),
                *islice(find_contradictions(self._db), _NAMED),
            ]
            return found or self._find_missing() or self._check_pages()
        except JournalError as error:
            # The error names the damaged plan.
            return [str(error)]

    def _compare_totals(self, *, unclear: bool) -> Iterator[str]:
        """Compare each table with its sealed total.

        `unclear` means that the sum of the trajectories cannot match, because one is known to be
        damaged."""
        # A journal of an earlier format lacks tables.
        for table in self._seal.totals:
            sealed, now = self._seal.totals[table], sum_table(self._db, table)
            if now.rows != sealed.rows:
                yield f"{table} has {now.rows} rows instead of {sealed.rows}"
            elif now != sealed and not (unclear and table == "trajectories"):
                yield f"rows of {table} differ from what was written"

    def _find_missing(self) -> list[str]:
        """Report missing planned trajectories: only a damaged key can hide them, and then their
        group is unknown."""
        missing = missing_attempts(self._db)
        return [f"{len(missing)} planned trajectories are missing"] if missing else []

    def _check_pages(self) -> list[str]:
        report = [text for (text,) in self._db.execute(f"PRAGMA integrity_check({_NAMED})")]
        return [] if report == ["ok"] else report

    @property
    def _position(self) -> Position:
        assert self._found.position is not None
        return self._found.position


def _not_in_quarantine(db: sqlite3.Connection, keys: list[AttemptKey]) -> list[AttemptKey]:
    """Return the damaged records that no earlier start has quarantined."""
    sql = "SELECT group_id, attempt_index, try FROM trajectories WHERE dropped = ?"
    known = {AttemptKey(*row) for row in db.execute(sql, (CORRUPT,))}
    return [key for key in keys if key not in known]


@contextmanager
def _limit_time(db: sqlite3.Connection, limit_s: float) -> Generator[Callable[[], bool]]:
    """Abort queries of a connection with an OperationalError when their time is up."""
    ends = time.monotonic() + limit_s

    def late() -> bool:
        return time.monotonic() > ends

    db.set_progress_handler(late, _STEPS_BETWEEN_LOOKS)
    try:
        yield late
    finally:
        db.set_progress_handler(None, 0)


def _describe_extent(position: Position) -> str:
    return f"{position.acknowledged} acknowledged trajectories and {position.step} steps"
