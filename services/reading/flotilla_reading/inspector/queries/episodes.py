"""One attempt: its messages, its outcome, and its tokens."""

import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.trajectory import Media, Trajectory
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.episodes.episode_rows import message_rows
from flotilla_common.episodes.episode_text import Decode, SequenceText, read_episode
from flotilla_common.episodes.imitated_attempts import imitating_step
from flotilla_common.run_folder.journal_columns import decode_column
from flotilla_common.run_folder.picture_tables import picture_of
from flotilla_common.run_folder.record_digests import DamagedRecordError
from flotilla_common.run_folder.token_stats import (
    SequenceKey,
    SequenceStats,
    TokenStatsError,
    read_token_stats,
    stats_path,
)
from flotilla_common.run_folder.trajectory_codec import outcome_fields
from flotilla_common.run_folder.trajectory_tables import (
    tools_of,
    trajectories_of,
    trajectory_of,
)
from flotilla_common.text.parsing import as_object
from flotilla_reading.inspector.queries.group_rows import GroupRow, TryRow, group_rows, with_tries
from flotilla_reading.inspector.queries.imitated_steps import read_imitated
from flotilla_reading.inspector.queries.run_folders import NotFoundError, read_journal
from flotilla_reading.inspector.queries.token_tracks import TokenTrack, make_track

_CACHED_STEPS, _CACHED_EPISODES = 2, 4
# Where a prompt's array of function schemas begins.
_SCHEMAS = re.compile(r'\[\s*\{\s*"type":\s*"function"')
# Most tokens that a character of four bytes may be spread over, and a few to be sure.
_LEAD = 8


@dataclass(frozen=True, slots=True)
class RunTokenizer:
    """Decoder of a run's tokens. `problem` is the reason if they are shown as numbers."""

    decode: Decode
    # Returns the text that each token adds; "" for one that ends within a character.
    texts_of: Callable[[Sequence[int]], list[str]]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Episode:
    """One try: its row, its group, its messages by sequence, and its token tracks.

    If the journal no longer keeps its tokens, `sequences` is empty and `pruned` is set."""

    row: TryRow
    group: GroupRow
    trajectory: Trajectory
    sequences: tuple[SequenceText, ...]
    tracks: tuple[TokenTrack, ...]
    tokenizer: RunTokenizer
    pruned: bool
    # Descriptions of the tools as the prompt has them, by name.
    tools: Mapping[str, str]

    def texts_of(self, sequence: int, start: int, end: int) -> list[str]:
        """Return the texts of tokens [start, end) of a sequence."""
        # Includes some tokens before them, because a character may have begun there.
        lead = min(start, _LEAD)
        ids = self.trajectory.sequences[sequence].token_ids[start - lead : end].tolist()
        return self.tokenizer.texts_of(ids)[lead:]

    def media_of(self, sequence: int, number: int) -> Media:
        """Return an item of media. Raises NotFoundError."""
        try:
            return self.trajectory.sequences[sequence].media[number]
        except IndexError:
            raise NotFoundError("The attempt has no such screenshot or answer.") from None


class EpisodeShelf:
    """Reads the episodes of one run; keeps the newest few. Usable from several threads."""

    def __init__(self, folder: Path, tokenizer: RunTokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._episodes: BoundedDict[AttemptKey, Episode] = BoundedDict(_CACHED_EPISODES)
        self._stats: BoundedDict[int, Mapping[SequenceKey, SequenceStats]] = BoundedDict(
            _CACHED_STEPS
        )

    def read(self, key: AttemptKey) -> Episode:
        """Read an attempt, or a sequence that a step imitated. Raises NotFoundError."""
        step = imitating_step(key.group_id)
        if step is not None:
            group, found = read_imitated(self._folder, step).find(key)
            return self._build(found.row, group, found.trajectory, b"", pruned=False)
        with read_journal(self._folder) as db:
            groups = group_rows(db, [key.group_id])
            group = with_tries(db, groups[0]) if groups else None
            row = next((r for r in group.tries if r.key == key), None) if group else None
            if group is None or row is None:
                raise NotFoundError(
                    f"There is no attempt {key.attempt_index}, try {key.attempt_try}, of group"
                    f" {key.group_id!r} in the journal."
                )
            pruned = _is_pruned(db, key)
            if known := self._find(key, group, pruned):
                return known
            trajectory = _load(db, key)
            text = tools_of(db, trajectory.facts.tool_schema_digest)
            where = f"the tools of group {key.group_id}"
            tools = decode_column(text, list[object], where) if text else None
        episode = self._build(row, group, trajectory, tools, pruned)
        with self._lock:
            self._episodes[key] = episode
        return episode

    def read_row(self, db: sqlite3.Connection, key: AttemptKey) -> dict[str, Any] | None:
        """Read the messages and the outcome of an attempt, as a row of dumps has them; None if its
        tokens are no longer kept or its record is damaged."""
        trajectories, _ = trajectories_of(db, [key])
        if not trajectories or not trajectories[0].sequences:
            return None
        [trajectory] = trajectories
        episode = read_episode(trajectory, self._tokenizer.decode)
        return {
            **outcome_fields(trajectory),
            "stop_reason": str(trajectory.end_reason),
            "messages": message_rows(episode, trajectory),
        }

    def _find(self, key: AttemptKey, group: GroupRow, pruned: bool) -> Episode | None:
        """Find a cached episode, unless its group or its tokens have changed since."""
        with self._lock:
            known = self._episodes.get(key)
        return known if known and (known.group, known.pruned) == (group, pruned) else None

    def _build(
        self,
        row: TryRow,
        group: GroupRow,
        trajectory: Trajectory,
        tools: Sequence[object] | None,
        pruned: bool,
    ) -> Episode:
        tokenizer = self._tokenizer
        sequences = read_episode(trajectory, tokenizer.decode).sequences
        key = trajectory.key
        stats, note = self._stats_of(group)
        tracks: list[TokenTrack] = []
        for number, sequence in enumerate(trajectory.sequences):
            found = stats.get((key, number))
            why = note or ("" if found else row.unused or "the step did not use it")
            tracks.append(make_track(sequence, found, why))
        described = _find_tools(sequences) if tools is None else _describe_tools(tools)
        return Episode(
            *(row, group, trajectory, sequences, tuple(tracks), tokenizer, pruned), tools=described
        )

    def _stats_of(self, group: GroupRow) -> tuple[Mapping[SequenceKey, SequenceStats], str]:
        """Return the trainer's values for a group's step, or why there are none."""
        if group.purpose != "train":
            return {}, "evaluations are not trained on"
        if group.step is None:
            return {}, "no step has trained on it" + (f": {group.reason}" if group.reason else "")
        with self._lock:
            if group.step in self._stats:
                return self._stats[group.step], ""
        try:
            found = read_token_stats(stats_path(self._folder, group.step)).sequences
        except TokenStatsError as error:
            return {}, _explain_missing(self._folder, group.step, str(error))
        with self._lock:
            self._stats[group.step] = found
        return found, ""


def _explain_missing(folder: Path, step: int, problem: str) -> str:
    try:
        lines = (folder / "token_stats" / "pruned.jsonl").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return problem
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("step") == step:
            return f"{problem}: {row.get('reason', '')}"
    return problem


def _is_pruned(db: sqlite3.Connection, key: AttemptKey) -> bool:
    sql = (
        "SELECT payload IS NULL FROM trajectories"
        " WHERE group_id = ? AND attempt_index = ? AND try = ?"
    )
    values = (key.group_id, key.attempt_index, key.attempt_try)
    return bool(db.execute(sql, values).fetchone()[0])


def _load(db: sqlite3.Connection, key: AttemptKey) -> Trajectory:
    try:
        found = trajectory_of(db, key)
    except DamagedRecordError as error:
        raise NotFoundError(
            "The journal's record of this attempt is damaged: it differs from what was written."
        ) from error
    shown = tuple(_with_files(db, key.group_id, each) for each in found.sequences)
    return replace(found, sequences=shown)


def _with_files(db: sqlite3.Connection, group_id: str, sequence: Sampled) -> Sampled:
    """Return a sequence whose pictures hold their files; damaged ones stay without."""
    media = tuple(
        replace(item, content=picture_of(db, group_id, item.sha256) or b"")
        if item in sequence.pictures
        else item
        for item in sequence.media
    )
    return replace(sequence, media=media)


def _find_tools(sequences: Sequence[SequenceText]) -> dict[str, str]:
    """Return the descriptions of tools that a prompt itself explains: chat templates for models
    that were trained without tools are given none."""
    messages = sequences[0].messages if sequences else ()
    for message in takewhile(lambda each: each.role != "assistant", messages):
        if begun := _SCHEMAS.search(message.content):
            try:
                rows, _ = json.JSONDecoder().raw_decode(message.content, begun.start())
            except (ValueError, RecursionError):
                return {}
            return _describe_tools(rows)
    return {}


def _describe_tools(rows: Sequence[object]) -> dict[str, str]:
    """Return the descriptions in function schemas."""
    functions = [as_object(as_object(row).get("function")) for row in rows]
    return {str(each.get("name")): str(each.get("description", "")) for each in functions}
