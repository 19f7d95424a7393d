"""Attempts of a group as far as it counts them: graded ones enter its mean, others do not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flotilla_common.domain.attempts import JUDGE_FAILED
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.open_groups import TOO_FEW_GRADED
from flotilla_learner.sampling.group_signal import has_signal


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """A received try without its arrays."""

    trajectory: Trajectory
    policy_tokens: int
    total_tokens: int
    # Oldest and newest version that wrote any of its tokens; absent if no policy did.
    oldest_version: int | None
    newest_version: int | None
    # Reason for not using it although it may have a reward: `orphan_policy`, `other_policy`.
    dropped: str = ""

    @property
    def is_graded(self) -> bool:
        return self.trajectory.reward is not None and not self.dropped

    @property
    def counts(self) -> bool:
        """True if it has a grade, or awaits its group's verdict."""
        return self.is_graded or (self.trajectory.awaits_verdict and not self.dropped)

    @property
    def spoils_group(self) -> bool:
        """True if no other attempt of its group may be used."""
        failure = self.trajectory.failure
        return failure is not None and failure.spoils_group and not self.dropped


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group with its graded attempts, in order of attempt. Until its verdict is there,
    those that await it are among them."""

    spec: GroupSpec
    graded: tuple[AttemptRecord, ...]
    failed: tuple[AttemptRecord, ...]
    # Monotonic seconds of its first lease and of its end.
    leased_at: float = 0.0
    ended_at: float = 0.0

    @property
    def oldest_version(self) -> int | None:
        versions = [r.oldest_version for r in self.graded if r.oldest_version is not None]
        return min(versions, default=None)

    @property
    def rewards(self) -> list[float]:
        return [r.trajectory.reward for r in self.graded if r.trajectory.reward is not None]

    @property
    def is_judged(self) -> bool:
        """True if a judge compares its attempts: their rewards say nothing about other groups."""
        return any(record.trajectory.judged for record in self.graded)

    @property
    def awaits_verdict(self) -> bool:
        return any(record.trajectory.awaits_verdict for record in self.graded)

    @property
    def has_signal(self) -> bool:
        return has_signal(self.rewards)


def make_record(trajectory: Trajectory, dropped: str = "") -> AttemptRecord:
    """Make the in-memory record of a try."""
    versions = [policy.version for policy in trajectory.policies]
    return AttemptRecord(
        trajectory=replace(trajectory, sequences=(), pictures={}),
        policy_tokens=trajectory.policy_tokens,
        total_tokens=sum(len(s.token_ids) for s in trajectory.sequences),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        dropped=dropped,
    )


def why_verdict_is_void(records: Sequence[AttemptRecord]) -> str:
    """Return why a group that an earlier start left with a verdict is dropped, if so: it has no
    scores, or they compare an attempt that is not used any more."""
    if any(record.trajectory.no_grade == JUDGE_FAILED for record in records):
        return JUDGE_FAILED
    scored = (each for each in records if each.trajectory.judged and each.trajectory.is_graded)
    return TOO_FEW_GRADED if any(record.dropped for record in scored) else ""


def make_ended_group(spec: GroupSpec, records: Sequence[AttemptRecord], now: float) -> ReadyGroup:
    """Make a group from the records that an earlier start left."""
    graded = tuple(r for r in records if r.is_graded)
    failed = tuple(record for record in records if record not in graded)
    return ReadyGroup(spec, graded, failed, leased_at=now, ended_at=now)
