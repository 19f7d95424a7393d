"""Blame for a task without grades: the task itself, or its surroundings. No own clock.

A task that failed is given up. It is quarantined only if a try under way in the meantime graded
another task of its environment: while a gateway or an environment is down, no task is graded, and
none is to blame."""

from collections import deque
from dataclasses import dataclass

from flotilla_common.aio.bounded_dict import BoundedDict

# Most tasks of one environment that wait for a witness; more come back in the next pass.
_WAITING = 256


@dataclass(frozen=True, slots=True)
class SuspectTask:
    """A task that was given up, and the time during which it was tried, in monotonic seconds."""

    task: str
    began: float
    ended: float


class Witnesses:
    """Recently graded tasks, and those that wait for a witness, by environment."""

    def __init__(self) -> None:
        # Time of the last graded try, for the two tasks graded most recently.
        self._graded: dict[str, BoundedDict[str, float]] = {}
        self._waiting: dict[str, deque[SuspectTask]] = {}

    def note_graded(self, env: str, task: str, began: float, ended: float) -> list[SuspectTask]:
        """Record a graded try; return the tasks that it shows to be at fault themselves."""
        self._graded.setdefault(env, BoundedDict(2))[task] = ended
        waiting = self._waiting.pop(env, deque[SuspectTask]())
        guilty = [s for s in waiting if s.task != task and began <= s.ended]
        left = [s for s in waiting if s.task != task and began > s.ended]
        if left:
            self._waiting[env] = deque(left, maxlen=_WAITING)
        return guilty

    def judge_suspect(self, env: str, suspect: SuspectTask) -> bool:
        """Return True if the task itself is at fault; `note_graded` may find out later."""
        lately = self._graded.get(env, {})
        if any(task != suspect.task and at >= suspect.began for task, at in lately.items()):
            return True
        self._waiting.setdefault(env, deque(maxlen=_WAITING)).append(suspect)
        return False
