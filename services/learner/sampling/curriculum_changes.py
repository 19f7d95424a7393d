"""What the journal keeps of the curriculum: where it stood, and what it thought of each task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Standing(StrEnum):
    """Whether a task is drawn."""

    ACTIVE = "active"
    # Parked: drawn now and then, to see whether it still is so.
    SOLVED = "solved"
    IMPOSSIBLE = "impossible"
    # Never drawn again in this run.
    QUARANTINED = "quarantined"

    @property
    def parked(self) -> bool:
        return self in (Standing.SOLVED, Standing.IMPOSSIBLE)


class EventKind(StrEnum):
    """What happened to a task."""

    PARKED = "parked"
    PROBED = "probed"
    UNPARKED = "unparked"
    QUARANTINED = "quarantined"
    # It should have been quarantined, but too many of its environment were already.
    QUARANTINE_REFUSED = "quarantine_refused"


@dataclass(slots=True)
class TaskState:
    """What is known of one task. `passes` and `attempts` are sums over its groups, each group
    weighing `decay` times as much as the next."""

    task: str
    env: str
    standing: Standing = Standing.ACTIVE
    groups: int = 0
    passes: float = 0.0
    attempts: float = 0.0
    # Its place among the parked tasks of its environment: the lowest is probed next.
    queued: int = 0
    # The pass in which it was last parked, quarantined or taken back, and whether that pass had
    # begun with it.
    turn: int = -1
    member: bool = True

    def stand(self, standing: Standing, turn: int) -> None:
        """Change the standing during pass `turn` of its environment."""
        was_active = self.standing is Standing.ACTIVE
        if was_active != (standing is Standing.ACTIVE) and self.turn != turn:
            self.turn, self.member = turn, was_active
        self.standing = standing

    def in_pass(self, turn: int) -> bool:
        """Whether the pass that is under way, `turn`, began with it."""
        return self.member if self.turn == turn else self.standing is Standing.ACTIVE

    @property
    def pass_rate(self) -> float:
        return self.passes / self.attempts if self.attempts else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the curriculum's log."""

    task: str
    env: str
    kind: EventKind
    # In words, for people.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far one environment has come."""

    drawn: int = 0
    # Which pass over its tasks, and the next place in it.
    turn: int = 0
    position: int = 0
    # How often a task was put at the end of those that are parked.
    queued: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """What goes into the journal at once: it holds for every draw from `number` on."""

    number: int
    # Of the plan that it was committed with; None when it came between two.
    step: int | None
    cursors: Mapping[str, Cursor]
    # The tasks that are not as they were.
    tasks: tuple[TaskState, ...] = ()
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """The curriculum as the journal has it."""

    number: int = 0
    cursors: Mapping[str, Cursor] = field(default_factory=dict[str, Cursor])
    tasks: tuple[TaskState, ...] = ()
