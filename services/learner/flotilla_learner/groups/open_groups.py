"""Open groups as the lease book keeps them."""

from dataclasses import dataclass

from flotilla_common.domain.attempts import AttemptKey
from flotilla_learner.group_types import GroupSpec, Lease

# Reason for dropping a group whose graded attempts were offered different tools.
TOOLS_CHANGED = "tools_changed"
# Of which some were graded, and others await a verdict.
GRADING_CHANGED = "grading_changed"
# With fewer graded attempts than `min_group`.
TOO_FEW_GRADED = "too_few_graded"


class LeaseLostError(KeyError):
    """The caller's lease has ended: it should drop the group."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Bounds that a lease book enforces."""

    train_slots: int
    eval_slots: int
    ttl_s: float
    group_deadline_s: float
    max_tries: int
    min_group: int


@dataclass(slots=True)
class AttemptProgress:
    """Progress of one attempt."""

    next_try: int = 0
    # The graded try.
    graded: AttemptKey | None = None
    ended: bool = False


@dataclass(slots=True)
class OpenGroup:
    """A group in the book."""

    spec: GroupSpec
    attempts: list[AttemptProgress]
    deadline: float
    oldest_version: int | None = None
    complete: bool = False
    lease: Lease | None = None
    expires: float = 0.0

    def record_grade(self, key: AttemptKey, oldest_version: int | None) -> None:
        """Record a graded try, and the oldest version that wrote any of it."""
        self.attempts[key.attempt_index].graded = key
        versions = [v for v in (self.oldest_version, oldest_version) if v is not None]
        self.oldest_version = min(versions, default=None)

    @property
    def missing_attempts(self) -> tuple[tuple[int, int], ...]:
        return tuple((i, a.next_try) for i, a in enumerate(self.attempts) if not a.ended)

    @property
    def graded_keys(self) -> tuple[AttemptKey, ...]:
        return tuple(a.graded for a in self.attempts if a.graded is not None)
