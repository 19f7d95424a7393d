"""The order of one environment's tasks: pass after pass, each a permutation of its own.

A pass begins with the tasks that are active then, and leaves out what is parked or quarantined
when its turn comes. No draw looks at more than one task, but for a pass's first, which shuffles
those of the pass.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from services.learner.sampling.curriculum_changes import Cursor, Standing, TaskState


class Passes:
    """Draws tasks by index. A function of the seed, the cursor and the tasks' standing."""

    def __init__(
        self,
        env: str,
        size: int,
        *,
        seed: int,
        probe_share: float,
        cursor: Cursor,
        states: Iterable[tuple[int, TaskState]] = (),
    ) -> None:
        self.env = env
        self.size = size
        self._seed = seed
        self._probe_share = probe_share
        self._drawn, self._turn, self._position = cursor.drawn, cursor.turn, cursor.position
        self._queued = cursor.queued
        # 1 for what is left out, by task.
        self._out = bytearray(size)
        self._active = size
        # The pass that is under way: its tasks in order, the place of each, and 1 for those that
        # were left out meanwhile.
        self._order: list[int] = []
        self._place: dict[int, int] = {}
        self._skipped = bytearray()
        self._restore(dict(states))

    @property
    def cursor(self) -> Cursor:
        return Cursor(self._drawn, self._turn, self._position, self._queued)

    @property
    def drawable(self) -> bool:
        """Whether there is a task that may still be drawn."""
        return bool(self._active or self._parked)

    def draw(self) -> tuple[int, int | None]:
        """The next task, and where it is queued again when it was a parked one."""
        self._drawn += 1
        share = self._probe_share
        due = int(self._drawn * share) > int((self._drawn - 1) * share)
        if self._parked and (due or not self._active):
            index, _ = self._parked.popitem(last=False)
            return index, self._queue(index)
        return self._next(), None

    def park(self, index: int) -> int:
        """Draw it only now and then; returns its place among those that are parked."""
        self._leave_out(index)
        return self._queue(index)

    def unpark(self, index: int) -> None:
        """Draw it again: in this pass if its place is still to come, else from the next on."""
        del self._parked[index]
        self._active += 1
        self._mark(index, 0)

    def remove(self, index: int) -> None:
        """Never draw it again."""
        if index in self._parked:
            del self._parked[index]
        else:
            self._leave_out(index)

    def _queue(self, index: int) -> int:
        self._parked[index] = None
        self._queued += 1
        return self._queued

    def _leave_out(self, index: int) -> None:
        self._active -= 1
        self._mark(index, 1)

    def _mark(self, index: int, out: int) -> None:
        self._out[index] = out
        if index in self._place:
            self._skipped[self._place[index]] = out

    def _next(self) -> int:
        place = self._skipped.find(0, self._position)
        if place < 0:
            self._turn, place = self._turn + 1, 0
            self._begin(_zeros(self._out))
        self._position = place + 1
        return self._order[place]

    def _restore(self, states: Mapping[int, TaskState]) -> None:
        """The pass that is under way, and who is left out."""
        turn = self._turn
        self._begin([i for i in range(self.size) if i not in states or states[i].in_pass(turn)])
        out = {i: state for i, state in states.items() if state.standing is not Standing.ACTIVE}
        for index in out:
            self._leave_out(index)
        parked = sorted((state.queued, i) for i, state in out.items() if state.standing.parked)
        self._parked = OrderedDict.fromkeys(index for _, index in parked)

    def _begin(self, members: list[int]) -> None:
        """A pass over these tasks, which are in order."""
        random.Random(f"{self._seed}/{self.env}/{self._turn}").shuffle(members)
        self._order = members
        self._place = {index: place for place, index in enumerate(members)}
        self._skipped = bytearray(len(members))


def _zeros(flags: bytearray) -> list[int]:
    """Where they are 0; skips runs of others at the speed of memory."""
    found: list[int] = []
    at = flags.find(0)
    while at >= 0:
        found.append(at)
        at = flags.find(0, at + 1)
    return found
