"""Episodes of a run for export: from its journal, or from dumps if the journal pruned them."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.episodes.episode_rows import StoredAttempt, attempt_row, key_of_row
from flotilla_common.episodes.episode_text import Decode
from flotilla_common.episodes.stored_attempts import count_attempts, find_attempts
from flotilla_common.run_folder import dump_files
from flotilla_common.run_folder.journal_columns import decode_column
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_common.run_folder.picture_tables import picture_of
from flotilla_common.run_folder.token_stats import (
    SequenceKey,
    SequenceStats,
    TokenStatsError,
    read_token_stats,
    stats_path,
)
from flotilla_common.run_folder.trajectory_tables import tools_of
from flotilla_reading.attempt_filter import AttemptFilter

Row = dict[str, Any]


class DamagedDumpError(JournalError):
    """A dump that stands in for pruned rows of the journal is damaged; the message gives the place
    and a fix."""


class KeptEpisodes:
    """Episodes of one run. `pruned` counts those whose tokens are no longer kept."""

    def __init__(self, db: sqlite3.Connection, run_dir: Path, decode: Decode) -> None:
        self._db = db
        self._run_dir = run_dir
        self._decode = decode
        self.pruned = 0
        # Attempts of one step or evaluation are adjacent.
        self._stats_of = lru_cache(1)(self._read_stats)
        self._tools_of = lru_cache(64)(self._read_tools)
        self._rows_of = lru_cache(1)(read_dumped_rows)

    def count(self, wanted: AttemptFilter) -> int:
        """Count the attempts, including those whose tokens were pruned."""
        return count_attempts(self._db, *wanted.to_sql())

    def find_rows(self, wanted: AttemptFilter) -> Iterator[Row | None]:
        """Yield the row of each attempt (see `episode_rows`); None if its tokens are no longer
        kept."""
        for attempt in find_attempts(self._db, *wanted.to_sql()):
            row = self._row_of(attempt)
            self.pruned += row is None
            yield row and self._with_tools(row)

    def find_row(self, key: AttemptKey) -> Row | None:
        """Return the row of one attempt; None if its tokens are no longer kept."""
        where = "t.group_id = ? AND t.attempt_index = ? AND t.try = ?"
        named = key.group_id, key.attempt_index, key.attempt_try
        rows = (self._row_of(each) for each in find_attempts(self._db, where, named))
        row = next(rows, None)
        return row and self._with_tools(row)

    def find_picture(self, row: Row, sha256: str, mime: str) -> bytes | None:
        """Return the file of a picture that a row shows, from the journal or a dump; None if it is
        in neither."""
        data, step = picture_of(self._db, row["group_id"], sha256), row["step"]
        if data is not None or step is None:
            return data
        archive = (
            self._eval_folder(row["eval_id"], step) / dump_files.PICTURES
            if row["eval_id"]
            else dump_files.pictures_path(self._run_dir, step)
        )
        return dump_files.read_zipped(archive, dump_files.picture_name(sha256, mime))

    def _row_of(self, attempt: StoredAttempt) -> Row | None:
        if attempt.trajectory.sequences:
            stats = {} if attempt.eval_id else self._stats_of(attempt.step)
            return attempt_row(attempt, stats, self._decode)
        path = self._dump_of(attempt)
        return self._rows_of(path).get(attempt.trajectory.key) if path else None

    def _with_tools(self, row: Row) -> Row:
        """Add the tools that the chat template was given, as JSON, in place of what it wrote about
        them by itself; null if it was given none."""
        tools = self._tools_of(row["facts"]["tool_schema_digest"])
        if not tools:
            return {**row, "tools": None}
        said = [each for each in row["messages"] if not each.get("by_template")]
        return {**row, "messages": said, "tools": tools}

    def _read_tools(self, digest: str) -> str:
        """Return tools as JSON; "" if they are unknown."""
        tools = tools_of(self._db, digest)
        if tools:
            decode_column(tools, list[object], f"the tools with the digest {digest}")
        return tools.decode()

    def _dump_of(self, attempt: StoredAttempt) -> Path | None:
        if attempt.step is None:
            return None
        if not attempt.eval_id:
            return dump_files.rollouts_path(self._run_dir, attempt.step)
        return dump_files.env_file(
            self._eval_folder(attempt.eval_id, attempt.step), attempt.env_key
        )

    def _eval_folder(self, eval_id: str, version: int) -> Path:
        return dump_files.eval_folder(self._run_dir, eval_id.split("-")[0], version)

    def _read_stats(self, step: int | None) -> Mapping[SequenceKey, SequenceStats]:
        if step is None:
            return {}
        try:
            return read_token_stats(stats_path(self._run_dir, step)).sequences
        except TokenStatsError:
            # The trainer's values for this step are not kept.
            return {}


def read_dumped_rows(path: Path) -> dict[AttemptKey, Row]:
    """Return the rows of a dump by attempt; none if there is no such file. Raises
    DamagedDumpError."""
    found: dict[AttemptKey, Row] = {}
    if not path.exists():
        return found
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row: Row = json.loads(line)
                found[key_of_row(row)] = row
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DamagedDumpError(
                    f"{path}: line {number} is no row of an attempt: {error!r}. Remove the file to"
                    " do without the episodes that only it has"
                ) from error
    return found
