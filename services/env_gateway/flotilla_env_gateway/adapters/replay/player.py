"""Playing of recorded episodes: finds what was answered to a call or a grade. Pure.

Of all recorded episodes of a task those stay in the play that agree with it so far, in what was
asked and in what was answered; the first of them answers. So an attempt meets its own recording,
and one that does something else meets that of another attempt that did the same. Between two calls
that may write, parallel ones may come in any order, as they do when a turn makes them together."""

from collections.abc import Iterator, Sequence

from flotilla_env_gateway.adapters.replay.record_format import CALL, GRADE, OPENED
from flotilla_env_gateway.adapters.replay.recorded_run import MissError, RecordedEpisode, Step

_SHOWN = 200
_ASKED = (CALL, GRADE)


class Player:
    """The play of one episode."""

    def __init__(self, episodes: Sequence[RecordedEpisode]) -> None:
        """Begin with all `episodes` that opened like the first."""
        self.opening = episodes[0].opening
        self._takes = [_Take(each) for each in episodes if each.opening == self.opening]
        # What it lacked; nothing is played any more.
        self.missed = ""

    @property
    def is_open(self) -> bool:
        return self.opening["op"] == OPENED

    def play_step(self, op: str, key: str, seq: int | None = None) -> Step:
        """Return the recorded step. Raises MissError if there is none, and ever after: what
        follows would be of another world."""
        found = [(take, index) for take in self._takes for index in take.find_step(op, key, seq)]
        if self.missed or not found:
            self.missed = self.missed or self._describe_miss(op, key)
            raise MissError(self.missed)
        first, index = found[0]
        step = first.steps[index]
        self._takes = [take for take, at in found if take.play_step(at).result == step.result]
        return step

    def reach_events(self) -> Iterator[Step]:
        """Yield what the environment told of itself, by now, once each."""
        yield from self._takes[0].reach_events()

    def _describe_miss(self, op: str, key: str) -> str:
        take = self._takes[0]
        left = next(take.list_open(), None)
        there = f"the {left.op} {left.key[:_SHOWN]} is next" if left else "it ends here"
        there = there if left or not take.episode.cut else f"it is cut here: {take.episode.cut}"
        name = take.episode.episode_id
        return f"the recorded run has no {op} {key[:_SHOWN]} here; in episode {name} {there}"


class _Take:
    """One recorded episode, and how far it was played."""

    def __init__(self, episode: RecordedEpisode) -> None:
        self.episode = episode
        self.steps = episode.steps
        # Behind the last played call that may write.
        self._start = 0
        self._played: set[int] = set()
        self._told = 0

    def find_step(self, op: str, key: str, seq: int | None) -> list[int]:
        """Return the index of an equal step that can be next, if there is one; of several the one
        with the same `seq`."""
        found: list[int] = []
        for index in range(self._start, len(self.steps)):
            step = self.steps[index]
            if index not in self._played:
                if (step.op, step.key) == (op, key):
                    found.append(index)
                if step.op == CALL and not step.parallel:
                    break
        return sorted(found, key=lambda index: self.steps[index].seq != seq)[:1]

    def play_step(self, index: int) -> Step:
        step = self.steps[index]
        self._played.add(index)
        if step.op == CALL and not step.parallel:
            self._start = index + 1
        return step

    def list_open(self) -> Iterator[Step]:
        """Yield the calls and grades that can still come."""
        for index in range(self._start, len(self.steps)):
            if index not in self._played and self.steps[index].op in _ASKED:
                yield self.steps[index]

    def reach_events(self) -> Iterator[Step]:
        while self._told < len(self.steps):
            step, passed = self.steps[self._told], self._told < self._start
            if step.op in _ASKED:
                if not passed and self._told not in self._played:
                    return
            else:
                yield step
            self._told += 1
