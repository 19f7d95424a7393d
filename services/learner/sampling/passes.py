"""The order of one environment's tasks: pass after pass, each a permutation of its own.

A pass leaves out what is parked or quarantined when its turn comes. No draw looks at more than
one task, but for a pass's first, which shuffles them all.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from services.learner.sampling.changes import Cursor, Standing, TaskState


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
        # The pass that is under way: its tasks in order, and the place of each.
        self._order: Sequence[int] = ()
        self._place: Sequence[int] = ()
        # 1 for what is left out: by place in the pass, and by task.
        self._skipped = bytearray()
        self._out = bytearray(size)
        self._active = size
        parked: list[tuple[int, int]] = []
        for index, state in states:
            if state.standing is not Standing.ACTIVE:
                self._leave_out(index)
            if state.standing.parked:
                parked.append((state.queued, index))
        self._parked = OrderedDict.fromkeys(index for _, index in sorted(parked))

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
        self._out[index] = 0
        self._active += 1
        if self._place:
            self._skipped[self._place[index]] = 0

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
        self._out[index] = 1
        self._active -= 1
        if self._place:
            self._skipped[self._place[index]] = 1

    def _next(self) -> int:
        if not self._order:
            self._shuffle()
        place = self._skipped.find(0, self._position)
        while place < 0:
            self._turn, self._position = self._turn + 1, 0
            self._shuffle()
            place = self._skipped.find(0)
        self._position = place + 1
        return self._order[place]

    def _shuffle(self) -> None:
        order = list(range(self.size))
        random.Random(f"{self._seed}/{self.env}/{self._turn}").shuffle(order)
        place = [0] * self.size
        for position, index in enumerate(order):
            place[index] = position
        self._order, self._place = order, place
        self._skipped = bytearray(self._out[index] for index in order)
