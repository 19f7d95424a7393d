"""Journaled part of the curriculum: its position, and its judgement of each task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class TaskStanding(StrEnum):
    """Status of a task, which determines how it is drawn, if at all."""

    ACTIVE = "active"
    # Parked: drawn occasionally, to see whether that still holds.
    SOLVED = "solved"
    IMPOSSIBLE = "impossible"
    # Never drawn again in this run.
    QUARANTINED = "quarantined"

    @property
    def is_parked(self) -> bool:
        return self in (TaskStanding.SOLVED, TaskStanding.IMPOSSIBLE)


class EventKind(StrEnum):
    """Kind of a task's event."""

    PARKED = "parked"
    PROBED = "probed"
    UNPARKED = "unparked"
    QUARANTINED = "quarantined"
    # It should have been quarantined, but too many of its environment already were.
    QUARANTINE_REFUSED = "quarantine_refused"


@dataclass(slots=True)
class TaskState:
    """Statistics of one task. `passes` and `attempts` are sums over its groups; each group has
    `decay` times the weight of the next."""

    task: str
    env: str
    standing: TaskStanding = TaskStanding.ACTIVE
    groups: int = 0
    passes: float = 0.0
    attempts: float = 0.0
    # Its place among the parked tasks of its environment: the lowest is probed next.
    queued: int = 0
    # Pass in which it was last parked, quarantined or taken back, and whether that pass had begun
    # with it.
    turn: int = -1
    member: bool = True

    def set_standing(self, standing: TaskStanding, turn: int) -> None:
        """Change the standing during pass `turn` of its environment."""
        was_active = self.standing is TaskStanding.ACTIVE
        if was_active != (standing is TaskStanding.ACTIVE) and self.turn != turn:
            self.turn, self.member = turn, was_active
        self.standing = standing

    def in_pass(self, turn: int) -> bool:
        """Return True if the current pass, `turn`, began with it."""
        return self.member if self.turn == turn else self.standing is TaskStanding.ACTIVE

    @property
    def pass_rate(self) -> float:
        return self.passes / self.attempts if self.attempts else 0.0


@dataclass(frozen=True, slots=True)
class CurriculumEvent:
    """One entry of the curriculum's log."""

    task: str
    env: str
    kind: EventKind
    # Explanation for people.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PassCursor:
    """Progress of one environment through its tasks."""

    drawn: int = 0
    # Current pass over its tasks, and the next place in it.
    turn: int = 0
    position: int = 0
    # Times that a task was put at the end of the parked ones.
    queued: int = 0


@dataclass(frozen=True, slots=True)
class CurriculumChange:
    """A change that is journaled at once: it holds for every draw from `number` on."""

    number: int
    # Step of the plan that it was committed with; None if it came between two.
    step: int | None
    cursors: Mapping[str, PassCursor]
    # The changed tasks.
    tasks: tuple[TaskState, ...] = ()
    events: tuple[CurriculumEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredCurriculum:
    """Curriculum as stored in the journal."""

    number: int = 0
    cursors: Mapping[str, PassCursor] = field(default_factory=dict[str, PassCursor])
    tasks: tuple[TaskState, ...] = ()
