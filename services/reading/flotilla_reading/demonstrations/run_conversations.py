"""Conversations of a run's accepted episodes, for a model of another tokenizer: their messages are
rendered, where those of the same tokenizer are imitated by their exact ids."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flotilla_common.episodes.conversations import Conversation, RenderEnd
from flotilla_common.episodes.demonstrations import episode_name
from flotilla_reading.demonstrations.acceptance import AcceptanceRules, Candidate, accept_episodes
from flotilla_reading.demonstrations.conversation_rows import (
    ConversationRowError,
    LeftOutError,
    read_row,
)
from flotilla_reading.demonstrations.run_episodes import list_episodes
from flotilla_reading.kept_episodes import KeptEpisodes
from flotilla_reading.trajectory_export import open_episodes


class RunConversations:
    """The accepted episodes of a run, as the messages of the last sequence of each."""

    def __init__(self, run_dir: Path, rules: AcceptanceRules) -> None:
        """Find the episodes. Raises TrajectoryExportError, JournalError, ConfigError."""
        self.source = run_dir.name
        self._run_dir = run_dir
        self._rules = rules
        with open_episodes(run_dir) as (db, _):
            self._found = accept_episodes(list_episodes(db, run_dir), rules)
        self.total = len(self._found.accepted)
        self._counts: Counter[str] = Counter()
        self._pruned: list[str] = []
        self._left_out: list[str] = []

    def read(self) -> Iterator[Conversation | None]:
        """Yield for each accepted episode its conversation, or None if it is left out."""
        with open_episodes(self._run_dir) as (_, episodes):
            for episode in self._found.accepted:
                yield self._read_episode(episodes, episode)

    def _read_episode(self, episodes: KeptEpisodes, episode: Candidate) -> Conversation | None:
        name, key = episode_name(episode.key), episode.key
        row = episodes.find_row(key)
        if row is None:
            self._counts["pruned"] += 1
            self._pruned.append(name)
            return None
        if len(row["sequences"]) > 1:
            self._counts["compacted"] += 1
            self._left_out.append(f"{name}: its conversation was compacted")
            return None
        try:
            fields = {name: row[name] for name in ("messages", "tools")}
            said = read_row({**fields, "key": episode.task_key}, self.source, name)
        except LeftOutError as error:
            self._counts[error.fate] += 1
            self._left_out.append(f"{name}: {error}")
            return None
        except ConversationRowError as error:
            # A policy may write what is no JSON object in place of arguments.
            self._counts["not_playable"] += 1
            self._left_out.append(f"{name}: {error}")
            return None
        assert said is not None
        place = key.group_id, key.attempt_index, key.attempt_try
        return Conversation(
            *(self.source, place, said.task_key, episode.reward or 0.0),
            *(said.system, said.prompt, said.turns, said.tools),
        )

    def end(self) -> RenderEnd:
        """Return what became of all episodes, once they are read."""
        counts = dict(self._found.counts + self._counts)
        rules, names = self._rules.to_dict(), tuple(self._left_out)
        return RenderEnd(self.source, rules, counts, tuple(self._pruned), names)
