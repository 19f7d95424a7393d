"""Order of one environment's tasks: pass after pass, each a permutation of its own.

A pass begins with the tasks that are active then, and skips those that are parked or quarantined
when their turn comes. No draw looks at more than one task, except a pass's first, which shuffles
its tasks."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from flotilla_learner.sampling.curriculum_changes import PassCursor, TaskStanding, TaskState


class TaskPasses:
    """Draws tasks by index: a function of the seed, the cursor and the tasks' standing."""

    def __init__(
        self,
        env: str,
        size: int,
        *,
        seed: int,
        probe_share: float,
        cursor: PassCursor,
        states: Iterable[tuple[int, TaskState]] = (),
    ) -> None:
        self.env = env
        self.size = size
        self._seed = seed
        self._probe_share = probe_share
        self._drawn, self._turn, self._position = cursor.drawn, cursor.turn, cursor.position
        self._queued = cursor.queued
        # 1 for each task that is left out.
        self._out = bytearray(size)
        self._active = size
        # Current pass: its tasks in order, the place of each, and 1 for those that were left out
        # meanwhile.
        self._order: list[int] = []
        self._place: dict[int, int] = {}
        self._skipped = bytearray()
        self._restore_pass(dict(states))

    @property
    def cursor(self) -> PassCursor:
        return PassCursor(self._drawn, self._turn, self._position, self._queued)

    @property
    def has_drawable(self) -> bool:
        """True if there is a task that may still be drawn."""
        return bool(self._active or self._parked)

    def draw_index(self) -> tuple[int, int | None]:
        """Draw the next task; also return its new queue position if it was parked."""
        self._drawn += 1
        share = self._probe_share
        due = int(self._drawn * share) > int((self._drawn - 1) * share)
        if self._parked and (due or not self._active):
            index, _ = self._parked.popitem(last=False)
            return index, self._queue_parked(index)
        return self._next_in_pass(), None

    def park_task(self, index: int) -> int:
        """Draw a task only occasionally; return its place among the parked ones."""
        self._leave_out(index)
        return self._queue_parked(index)

    def unpark_task(self, index: int) -> None:
        """Draw a task again: in this pass if its place is yet to come, else from the next."""
        del self._parked[index]
        self._active += 1
        self._set_left_out(index, 0)

    def remove_task(self, index: int) -> None:
        """Never draw a task again."""
        if index in self._parked:
            del self._parked[index]
        else:
            self._leave_out(index)

    def _queue_parked(self, index: int) -> int:
        self._parked[index] = None
        self._queued += 1
        return self._queued

    def _leave_out(self, index: int) -> None:
        self._active -= 1
        self._set_left_out(index, 1)

    def _set_left_out(self, index: int, out: int) -> None:
        self._out[index] = out
        if index in self._place:
            self._skipped[self._place[index]] = out

    def _next_in_pass(self) -> int:
        place = self._skipped.find(0, self._position)
        if place < 0:
            self._turn, place = self._turn + 1, 0
            self._begin_pass([index for index, out in enumerate(self._out) if not out])
        self._position = place + 1
        return self._order[place]

    def _restore_pass(self, states: Mapping[int, TaskState]) -> None:
        """Restore the current pass, and the tasks that are left out."""
        turn = self._turn
        self._begin_pass(
            [i for i in range(self.size) if i not in states or states[i].in_pass(turn)]
        )
        out = {i: state for i, state in states.items() if state.standing is not TaskStanding.ACTIVE}
        for index in out:
            self._leave_out(index)
        parked = sorted((state.queued, i) for i, state in out.items() if state.standing.is_parked)
        self._parked = OrderedDict.fromkeys(index for _, index in parked)

    def _begin_pass(self, members: list[int]) -> None:
        """Begin a pass over these tasks, given in order."""
        random.Random(f"{self._seed}/{self.env}/{self._turn}").shuffle(members)
        self._order = members
        self._place = {index: place for place, index in enumerate(members)}
        self._skipped = bytearray(len(members))
