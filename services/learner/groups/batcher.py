"""Complete groups on their way to a step. No I/O.

Groups leave oldest first, by their place in the curriculum. How many wait is bounded by the
lease book's slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from services.learner.groups.types import GroupSpec
from services.learner.trajectory import Trajectory, policy_mask
from services.learner.types import AttemptKey, StepSettings, TrainBatch, TrainSequence


@dataclass(frozen=True, slots=True)
class Record:
    """A received try without its arrays."""

    trajectory: Trajectory
    policy_tokens: int
    total_tokens: int
    # Oldest and newest version that wrote any of it; absent when no policy did.
    oldest_version: int | None
    newest_version: int | None
    # Why it is not used although it may have a reward: `orphan_policy`, `other_policy`.
    dropped: str = ""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group: its graded attempts, in order of attempt."""

    spec: GroupSpec
    graded: tuple[Record, ...]
    failed: tuple[Record, ...]
    # Monotonic seconds of its first lease and of its end.
    leased_at: float = 0.0
    ended_at: float = 0.0

    @property
    def oldest_version(self) -> int | None:
        versions = [r.oldest_version for r in self.graded if r.oldest_version is not None]
        return min(versions, default=None)

    def older_than(self, version: int) -> bool:
        """Whether an older version wrote any of it."""
        return self.oldest_version is not None and self.oldest_version < version

    @property
    def rewards(self) -> list[float]:
        return [r.trajectory.reward for r in self.graded if r.trajectory.reward is not None]

    @property
    def constant(self) -> bool:
        """No attempt was better than another: the group has no gradient."""
        return len(set(self.rewards)) <= 1


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step takes: groups that are trained, and those left out for want of signal."""

    groups: tuple[ReadyGroup, ...]
    filtered: tuple[ReadyGroup, ...]

    @property
    def attempts(self) -> tuple[AttemptKey, ...]:
        return tuple(r.trajectory.key for group in self.groups for r in group.graded)

    @property
    def all_groups(self) -> tuple[ReadyGroup, ...]:
        return self.groups + self.filtered


class Batcher:
    """Holds complete groups until a step takes them or they are too stale."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, drop_constant: bool) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._drop_constant = drop_constant
        self._ready: list[ReadyGroup] = []

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, group: ReadyGroup) -> None:
        self._ready.append(group)

    def oldest_allowed(self, trainer_version: int) -> int:
        """What a step from this version on may train on (I7)."""
        return trainer_version - self._max_staleness

    def drop_stale(self, trainer_version: int) -> list[ReadyGroup]:
        """Remove and return what the next step may no longer train on."""
        bound = self.oldest_allowed(trainer_version)
        stale = [group for group in self._ready if group.older_than(bound)]
        self._ready = [group for group in self._ready if not group.older_than(bound)]
        return stale

    def take(self, trainer_version: int) -> Batch | None:
        """Remove and return one step's groups, or nothing while there are too few.

        When every group is constant none is left out: a step always has attempts.
        """
        bound = self.oldest_allowed(trainer_version)
        usable = [group for group in self._ready if not group.older_than(bound)]
        usable.sort(key=lambda group: (group.spec.sequence_number, group.spec.requeues))
        taken = usable[: self._groups_per_step]
        if len(taken) < self._groups_per_step:
            return None
        self._ready = [group for group in self._ready if group not in taken]
        filtered = [g for g in taken if g.constant] if self._drop_constant else []
        if len(filtered) == len(taken):
            filtered = []
        return Batch(tuple(g for g in taken if g not in filtered), tuple(filtered))


def record_of(trajectory: Trajectory, dropped: str = "") -> Record:
    """A try as it is kept in memory."""
    versions = [policy.version for policy in trajectory.policies]
    return Record(
        trajectory=replace(trajectory, sequences=()),
        policy_tokens=trajectory.policy_tokens,
        total_tokens=sum(len(s.token_ids) for s in trajectory.sequences),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        dropped=dropped,
    )


def train_batch(
    step: int, attempts: Iterable[Trajectory], settings: StepSettings | None = None
) -> TrainBatch:
    """What the ranks train on in `step`: a function of the plan alone (I5)."""
    rows = [row for attempt in attempts for row in _train_sequences(step, attempt)]
    return TrainBatch(step, tuple(rows), settings or StepSettings())


def _train_sequences(step: int, attempt: Trajectory) -> list[TrainSequence]:
    if attempt.reward is None or not attempt.sequences:
        raise ValueError(f"{attempt.key} cannot be trained on: it has no reward or no tokens")
    versions = [policy.version for policy in attempt.policies]
    staleness = step - 1 - min(versions, default=step - 1)
    rows: list[TrainSequence] = []
    for sequence in attempt.sequences:
        mask = policy_mask(sequence)
        logprobs = np.zeros(len(mask), dtype=np.float32)
        logprobs[mask] = sequence.logprobs
        temperatures = [s.temperature for s in sequence.spans if s.temperature is not None]
        row = TrainSequence(
            group_id=attempt.key.group_id,
            attempt_index=attempt.key.attempt_index,
            reward=attempt.reward,
            token_ids=sequence.token_ids.astype(np.int32),
            policy_mask=mask,
            behaviour_logprobs=logprobs,
            temperature=temperatures[0] if temperatures else 1.0,
            staleness=staleness,
        )
        rows.append(row)
    return rows
