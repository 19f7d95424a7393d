"""Writer of the files of finished steps and evaluations. Blocks: runs in its own process."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.episodes.demonstrations import (
    DemonstrationFile,
    DemonstrationsError,
    read_demonstrations,
)
from flotilla_common.episodes.episode_rows import StoredAttempt, attempt_row
from flotilla_common.episodes.episode_text import Decode
from flotilla_common.episodes.imitated_attempts import imitated_attempt
from flotilla_common.episodes.stored_attempts import find_attempts
from flotilla_common.run_folder import dump_files
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError, open_read_only
from flotilla_common.run_folder.picture_tables import picture_of
from flotilla_common.run_folder.token_stats import (
    SequenceKey,
    SequenceStats,
    StepStats,
    TokenStatsError,
    encode_stats,
    stats_path,
)
from flotilla_learner.dumps.jobs import (
    DumpJob,
    DumpReport,
    DumpSetup,
    EvalJob,
    ImitationJob,
    StepJob,
)
from flotilla_learner.dumps.planned_attempts import NotInJournalError, planned_attempts
from flotilla_learner.dumps.step_stats import join_stats
from flotilla_learner.ranks.protocol import read_tokens

# Pictures by their hash: a group that shows them, and their type.
Shown = dict[str, tuple[str, str]]
Stats = Mapping[SequenceKey, SequenceStats]
# Files that a job could not write: name and reason.
Losses = dict[str, str]
_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    sqlite3.Error,
    JournalError,
    NotInJournalError,
    SafetensorError,
    TokenStatsError,
)


class DumpWriter:
    """Writes one run's dumps.

    Calls `written` with each finished file."""

    def __init__(
        self,
        setup: DumpSetup,
        decode: Decode,
        written: Callable[[Path], None],
    ) -> None:
        self._setup = setup
        self._run_dir = Path(setup.run_dir)
        self._decode = decode
        self._written = written
        # What the run imitates, once a job has needed it.
        self._demonstrations: DemonstrationFile | None = None

    def do_job(self, job: DumpJob) -> DumpReport:
        """Write the files of a job; the report lists those that could not be written."""
        lost: Losses = {}
        if isinstance(job, StepJob):
            count = self._dump_step(job, lost)
        elif isinstance(job, ImitationJob):
            count = self._dump_imitation(job, lost)
        else:
            count = self._dump_eval(job, lost)
        return DumpReport(job.name, count, lost)

    def _dump_step(self, job: StepJob, lost: Losses) -> int:
        stats, count = self._keep_stats(job, lost, lambda: self._planned_attempts(job.step))
        if job.step % self._setup.every == 0:
            path = dump_files.rollouts_path(self._run_dir, job.step)
            values = stats.sequences if stats else {}
            shown: Shown = {}
            count += self._write(path, lost, lambda: self._rows_of_step(job.step, values, shown))
            path = dump_files.pictures_path(self._run_dir, job.step)
            count += self._write_pictures(path, shown, lost)
        self._prune_steps(lost)
        return count

    def _dump_imitation(self, job: ImitationJob, lost: Losses) -> int:
        try:
            attempts = self._imitated_attempts(job)
        except (DemonstrationsError, IndexError) as error:
            job.discard()
            lost[job.name] = str(error)
            return 0
        found = [each.trajectory for each in attempts]
        stats, count = self._keep_stats(job, lost, lambda: found)
        if job.step % self._setup.every == 0:
            path = dump_files.rollouts_path(self._run_dir, job.step)
            values = stats.sequences if stats else {}
            lines = (self._line_of(each, values) for each in attempts)
            count += self._write(path, lost, lambda: lines)
        self._prune_steps(lost)
        return count

    def _imitated_attempts(self, job: ImitationJob) -> list[StoredAttempt]:
        """Return what a step imitated. Raises DemonstrationsError, or IndexError for a place that
        the file does not have."""
        if self._demonstrations is None or self._demonstrations.sha256 != job.sha256:
            self._demonstrations = read_demonstrations(Path(job.data))
        if self._demonstrations.sha256 != job.sha256:
            raise DemonstrationsError(f"{job.data} is another file than the run imitates")
        chosen = [self._demonstrations.sequences[place] for place in job.places]
        return [
            imitated_attempt(
                *(job.step, number),
                replace(
                    each,
                    token_ids=each.token_ids[: job.longest],
                    trained=each.trained[: job.longest],
                ),
            )
            for number, each in enumerate(chosen)
        ]

    def _prune_steps(self, lost: Losses) -> None:
        try:
            dump_files.prune_steps(self._run_dir, self._setup.keep)
        except OSError as error:
            lost["pruning"] = str(error)

    def _keep_stats(
        self, job: StepJob | ImitationJob, lost: Losses, attempts: Callable[[], list[Trajectory]]
    ) -> tuple[StepStats | None, int]:
        """Write the ranks' token values of `attempts`; return them, and the bytes written."""
        path = stats_path(self._run_dir, job.step)
        if job.token_file is None:
            lost[path.name] = "the ranks had no room for it in shared memory"
            return None, 0
        try:
            tokens = read_tokens(Path(job.token_file))
            stats = join_stats(job.step, job.base_version, attempts(), tokens)
        except _FAILURES as error:
            lost[path.name] = str(error)
            return None, 0
        finally:
            job.discard()
        return stats, self._write(path, lost, lambda: [encode_stats(stats)])

    def _planned_attempts(self, step: int) -> list[Trajectory]:
        with open_read_only(self._run_dir / JOURNAL_FILE) as db:
            return planned_attempts(db, step)

    def _rows_of_step(self, step: int, stats: Stats, shown: Shown) -> Iterator[bytes]:
        """Yield all attempts at the groups that a step counted, including those it left out; add
        the pictures that they show."""
        with open_read_only(self._run_dir / JOURNAL_FILE) as db:
            for attempt in find_attempts(db, "g.step = ?", (step,)):
                _add_shown(shown, attempt)
                yield self._line_of(attempt, stats)

    def _dump_eval(self, job: EvalJob, lost: Losses) -> int:
        folder = dump_files.eval_folder(self._run_dir, job.moment, job.version)
        by_env: dict[str, list[StoredAttempt]] = defaultdict(list)
        shown: Shown = {}
        try:
            with open_read_only(self._run_dir / JOURNAL_FILE) as db:
                for attempt in find_attempts(db, "g.eval_id = ?", (job.eval_id,)):
                    by_env[attempt.env_key].append(attempt)
                    _add_shown(shown, attempt)
        except _FAILURES as error:
            lost[job.name] = str(error)
            return 0
        count = 0
        for env_key, attempts in by_env.items():
            path = dump_files.env_file(folder, env_key)
            count += self._write(path, lost, lambda found=attempts: map(self._line_of, found))
        count += self._write_pictures(folder / dump_files.PICTURES, shown, lost)
        aggregated = folder / dump_files.AGGREGATED
        return count + self._write(aggregated, lost, lambda: [dump_files.json_line(job.metrics)])

    def _write_pictures(self, path: Path, shown: Shown, lost: Losses) -> int:
        """Write the archive of pictures, if there are any; return its bytes."""
        files = self._picture_files(path, shown, lost)
        return self._write(path, lost, lambda: dump_files.zip_parts(files)) if shown else 0

    def _picture_files(self, path: Path, shown: Shown, lost: Losses) -> Iterator[tuple[str, bytes]]:
        left = self._setup.picture_bytes
        with open_read_only(self._run_dir / JOURNAL_FILE) as db:
            for number, (sha256, (group_id, mime)) in enumerate(shown.items()):
                data = picture_of(db, group_id, sha256)
                if data is None:
                    lost[f"{path.name}: {sha256}"] = "it is damaged, or no longer in the journal"
                elif len(data) > left:
                    lost[path.name] = (
                        f"{len(shown) - number} of {len(shown)} pictures are above"
                        f" learner.dumps.picture_bytes = {self._setup.picture_bytes}"
                    )
                    return
                else:
                    left -= len(data)
                    yield dump_files.picture_name(sha256, mime), data

    def _line_of(self, attempt: StoredAttempt, stats: Stats | None = None) -> bytes:
        return dump_files.json_line(attempt_row(attempt, stats or {}, self._decode))

    def _write(self, path: Path, lost: Losses, parts: Callable[[], Iterable[bytes]]) -> int:
        """Write a file; return its bytes, 0 if it is lost."""
        try:
            count = dump_files.write_whole(path, parts())
        except _FAILURES as error:
            lost[path.relative_to(self._run_dir).as_posix()] = str(error)
            return 0
        self._written(path)
        return count


def _add_shown(shown: Shown, attempt: StoredAttempt) -> None:
    trajectory = attempt.trajectory
    for sha256, item in trajectory.shown_pictures.items():
        shown.setdefault(sha256, (trajectory.key.group_id, item.mime))
