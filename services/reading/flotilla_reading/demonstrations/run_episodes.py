"""Demonstrations from a run: its accepted episodes, from the journal, or from dumps where the
journal pruned them. Nothing is rendered: both hold the exact token ids, and who wrote each."""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_common.domain.attempts import AttemptKey, Purpose
from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.domain.trajectory import Sequence as TokenSequence
from flotilla_common.episodes.demonstrations import (
    Demonstration,
    DemonstrationHead,
    episode_name,
    write_demonstrations,
)
from flotilla_common.episodes.episode_rows import sequence_of_row
from flotilla_common.run_folder.dump_files import rollouts_path
from flotilla_common.run_folder.journal_columns import decode_column, group_task
from flotilla_common.run_folder.journal_file import BEGAN_WITH, JOURNAL_FILE, open_read_only
from flotilla_common.run_folder.record_digests import DamagedRecordError
from flotilla_common.run_folder.trajectory_tables import trajectory_of
from flotilla_reading.demonstrations.acceptance import (
    AcceptanceRules,
    Candidate,
    accept_episodes,
)
from flotilla_reading.kept_episodes import read_dumped_rows

_EPISODES = """
SELECT t.group_id, t.attempt_index, t.try, t.reward, t.payload IS NOT NULL, g.step, g.purpose,
  g.spec
FROM trajectories t JOIN groups g USING (group_id)
ORDER BY g.sequence_number, t.group_id, t.attempt_index, t.try
"""


class NoDemonstrationsError(Exception):
    """A run has nothing to imitate; the message gives the reason and the remedy."""


def make_demonstrations(
    run_dir: Path,
    out: Path,
    rules: AcceptanceRules,
    show_progress: Callable[[int, int], object] = lambda done, total: None,
) -> DemonstrationHead:
    """Write the accepted episodes of a run to `out`, and return what the file says of them.
    `show_progress` gets the number of accepted episodes that were read, and of all.

    Raises NoDemonstrationsError, JournalError or OSError; then nothing is left behind."""
    journal = run_dir / JOURNAL_FILE
    if not journal.exists():
        raise NoDemonstrationsError(f"{journal} does not exist, so no episode is known")
    with open_read_only(journal) as db:
        tokenizer = _tokenizer_of(db, run_dir.name)
        found = accept_episodes(list_episodes(db, run_dir), rules)
        reader = EpisodeReader(db, run_dir)
        sequences: list[Demonstration] = []
        for done, episode in enumerate(found.accepted, 1):
            sequences += reader.read_episode(episode)
            show_progress(done, len(found.accepted))
    counts = dict(found.counts + reader.counts)
    head = DemonstrationHead(run_dir.name, tokenizer, rules.to_dict(), counts, tuple(reader.pruned))
    if not sequences:
        raise NoDemonstrationsError(f"run {run_dir.name} has nothing to imitate: {explain(head)}")
    write_demonstrations(out, head, sequences)
    return head


def recorded_tokenizer(run_dir: Path) -> str:
    """Return the digest of the tokenizer of a run's ids, in hex. Raises NoDemonstrationsError,
    JournalError."""
    journal = run_dir / JOURNAL_FILE
    if not journal.exists():
        raise NoDemonstrationsError(f"{journal} does not exist, so no episode is known")
    with open_read_only(journal) as db:
        return _tokenizer_of(db, run_dir.name)


class EpisodeReader:
    """Reads the tokens of accepted episodes. `counts` has the number of those that were left out
    for a reason, and of sequences and tokens; `pruned` names those whose tokens are gone."""

    def __init__(self, db: sqlite3.Connection, run_dir: Path) -> None:
        self._db = db
        self._run_dir = run_dir
        self.counts: Counter[str] = Counter()
        self.pruned: list[str] = []
        # Episodes of one step are adjacent.
        self._rows_of = lru_cache(1)(read_dumped_rows)

    def read_episode(self, episode: Candidate) -> list[Demonstration]:
        """Return the sequences of an episode that have tokens to train on."""
        try:
            kept = list(self._read_sequences(episode))
        except DamagedRecordError:
            self.counts["damaged"] += 1
            return []
        if not kept:
            self.counts["pruned"] += 1
            self.pruned.append(episode_name(episode.key))
            return []
        if any(shows_pictures for _, shows_pictures in kept):
            self.counts["with_pictures"] += 1
            return []
        trained = [each for each, _ in kept if each.trained.any()]
        self.counts["without_trained_tokens"] += not trained
        self.counts["sequences"] += len(trained)
        self.counts["sequences_without_trained_tokens"] += len(kept) - len(trained)
        self.counts["tokens"] += sum(len(each.token_ids) for each in trained)
        self.counts["trained_tokens"] += sum(int(each.trained.sum()) for each in trained)
        return trained

    def _read_sequences(self, episode: Candidate) -> Iterator[tuple[Demonstration, bool]]:
        """Yield each sequence of an episode, and whether it shows pictures; none if its tokens are
        gone. A sequence that continues a parent names what they share as its prompt, so that only
        its own tokens are trained. Raises DamagedRecordError."""
        trajectory = trajectory_of(self._db, episode.key)
        for sequence in trajectory.sequences:
            self.counts["continued_sequences"] += bool(sequence.shared)
            yield self._to_demonstration(episode, sequence), bool(sequence.pictures)
        if trajectory.sequences or episode.step is None:
            return
        row = self._rows_of(rollouts_path(self._run_dir, episode.step)).get(episode.key)
        for dumped in row["sequences"] if row else ():
            yield (
                self._to_demonstration(episode, sequence_of_row(dumped)),
                bool(dumped.get("pictures")),
            )

    def _to_demonstration(self, episode: Candidate, sequence: TokenSequence) -> Demonstration:
        return Demonstration(
            *(self._run_dir.name, episode.key, episode.task_key, episode.reward or 0.0),
            *(sequence.token_ids.astype(np.int32), policy_mask(sequence.spans)),
        )


def explain(head: DemonstrationHead) -> str:
    """Say in words what became of a run's episodes, and how to keep those that are gone; or of a
    file's conversations."""
    counts, rules = Counter(head.counts), head.selection
    parts = [f"{counts['sequences']:,} sequences with {counts['trained_tokens']:,} trained tokens"]
    what = "conversations" if "ignored" in rules else "episodes"
    parts.append(f"of {counts['accepted']:,} accepted {what}")
    reasons = {
        "below_min_reward": f"below reward {rules.get('min_reward')}",
        "not_best": f"not the best of {rules.get('best_of')}",
        "ungraded": "without a grade",
        "evaluated": "of evaluations",
    }
    others = [f"{counts[name]:,} {text}" for name, text in reasons.items() if counts[name]]
    if others:
        parts.append(f"not accepted: {', '.join(others)}")
    lost = {
        "pruned": "whose tokens were pruned (learner.journal.keep_payloads keeps them)",
        "with_pictures": "that show pictures, which are not imitated yet",
        "damaged": "that are damaged",
        "compacted": "whose conversation was compacted",
        "not_playable": "that no policy could have played",
        "tools_not_offered": "with calls of tools that they do not offer",
        "not_rendered": "that the dialect cannot render",
        "without_trained_tokens": "without a token of the policy",
    }
    gone = [f"{counts[name]:,} {text}" for name, text in lost.items() if counts[name]]
    parts += [f"left out: {', '.join(gone)}"] if gone else []
    if unread := counts["turns_not_read_back"]:
        parts.append(f"{unread:,} turns are not trained, since the dialect reads them otherwise")
    return "; ".join(parts)


def list_episodes(db: sqlite3.Connection, run_dir: Path) -> Iterator[Candidate]:
    dumped = lru_cache(None)(lambda step: rollouts_path(run_dir, step).exists())
    for group, attempt, number, reward, stored, step, purpose, spec in db.execute(_EPISODES):
        kept = bool(stored) or (step is not None and dumped(step))
        key = AttemptKey(group, attempt, number)
        task_key = group_task(group, spec).task_key
        yield Candidate(key, task_key, reward, step, purpose == Purpose.EVAL, kept)


def _tokenizer_of(db: sqlite3.Connection, run_id: str) -> str:
    """Return the digest of the tokenizer of the run's ids. Raises NoDemonstrationsError
    and DamagedColumnError."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (BEGAN_WITH,)).fetchone()
    where = f"{BEGAN_WITH} in the table meta"
    digest = decode_column(row[0], dict[str, Any], where).get("tokenizer") if row else None
    if not digest:
        raise NoDemonstrationsError(
            f"the journal of run {run_id} names no tokenizer, because its learner never began"
        )
    return str(digest)
