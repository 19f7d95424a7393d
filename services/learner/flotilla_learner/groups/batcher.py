"""Complete groups on their way to a step. No I/O.

Groups leave oldest first, by curriculum position. The lease book's slots bound how many wait.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.domain.trajectory import Trajectory
from flotilla_learner.groups.graded_attempts import ReadyGroup
from flotilla_learner.groups.staleness import is_stale, keep_fresh, oldest_allowed
from flotilla_learner.sampling.group_signal import GroupOutcome
from flotilla_learner.types import (
    StepSettings,
    TeacherScores,
    TrainBatch,
    TrainSequence,
    TurnTokens,
)

WithoutSignal = Literal["mask", "drop", "replace"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups of one step: the trained ones, and those left out for lack of signal."""

    groups: tuple[ReadyGroup, ...]
    filtered: tuple[ReadyGroup, ...]
    # Number of `filtered` groups that were replaced by others.
    replaced: int = 0

    @property
    def attempt_keys(self) -> tuple[AttemptKey, ...]:
        return tuple(r.trajectory.key for group in self.groups for r in group.graded)

    @property
    def all_groups(self) -> tuple[ReadyGroup, ...]:
        return self.groups + self.filtered

    @property
    def places_without_signal(self) -> int:
        """Number of the step's places taken by groups without signal."""
        unreplaced = (*self.groups, *self.filtered[self.replaced :])
        return sum(not group.has_signal for group in unreplaced)

    @property
    def outcomes(self) -> list[GroupOutcome]:
        """Outcomes of its graded groups, in draw order; judged ones have no passes to count."""
        return [
            GroupOutcome(g.spec.task.key, g.rewards)
            for g in sorted(self.all_groups, key=_draw_order)
            if not g.is_judged
        ]


class Batcher:
    """Store of complete groups until a step takes them or they are too stale.

    Groups without signal are trained like all others (`mask`), left out (`drop`), or left out
    and replaced (`replace`: the dynamic sampling of DAPO, arXiv:2503.14476, section 3.2): the
    step then waits for `groups_per_step` groups with signal, unless `max_refill` times as many
    without signal were already replaced."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        without_signal: WithoutSignal = "mask",
        max_refill: int = 0,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._without_signal = without_signal
        self._most_replaced = max_refill * groups_per_step if without_signal == "replace" else 0
        self._ready: list[ReadyGroup] = []
        self._replaced: list[ReadyGroup] = []

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def waiting(self) -> tuple[ReadyGroup, ...]:
        """Groups that a coming step may take."""
        return tuple(self._ready)

    def add_group(self, group: ReadyGroup) -> bool:
        """Add a group; return True if it has no signal and another should be sampled in its
        place. It then no longer needs a slot."""
        replace_it = not group.has_signal and len(self._replaced) < self._most_replaced
        (self._replaced if replace_it else self._ready).append(group)
        return replace_it

    def add_replaced(self, group: ReadyGroup) -> None:
        """Restore a group that an earlier start had replaced."""
        self._replaced.append(group)

    def put_back(self, batch: Batch, *, without: Collection[str]) -> None:
        """Undo `take_batch`, except for the groups with these ids."""
        kept = [g for g in batch.all_groups if g.spec.group_id not in without]
        replaced = [g for g in batch.filtered[: batch.replaced] if g in kept]
        self._replaced += replaced
        self._ready += [g for g in kept if g not in replaced]

    def oldest_allowed(self, trainer_version: int) -> int:
        """Return the oldest version that a step from this version on may train on."""
        return oldest_allowed(trainer_version, self._max_staleness)

    def drop_stale(self, trainer_version: int) -> list[ReadyGroup]:
        """Remove and return the groups that the next step may no longer train on or count."""
        bound = self.oldest_allowed(trainer_version)
        waiting = (*self._replaced, *self._ready)
        self._replaced = keep_fresh(self._replaced, bound)
        self._ready = keep_fresh(self._ready, bound)
        return [group for group in waiting if is_stale(group, bound)]

    def take_batch(self, trainer_version: int) -> Batch | None:
        """Remove and return one step's groups; return None while there are too few.

        If no group has signal, none is left out: a step always has attempts."""
        bound = self.oldest_allowed(trainer_version)
        usable = sorted(keep_fresh(self._ready, bound), key=_draw_order)
        taken = usable[: self._groups_per_step]
        if len(taken) < self._groups_per_step:
            return None
        self._ready = [group for group in self._ready if group not in taken]
        replaced = sorted(keep_fresh(self._replaced, bound), key=_draw_order)
        self._replaced = [group for group in self._replaced if group not in replaced]
        without_signal = [group for group in taken if not group.has_signal]
        if self._without_signal == "mask" or len(without_signal) == len(taken):
            without_signal = []
        groups = tuple(group for group in taken if group not in without_signal)
        return Batch(groups, (*replaced, *without_signal), len(replaced))


def _draw_order(group: ReadyGroup) -> tuple[int, int]:
    """Return a group's curriculum position."""
    return group.spec.sequence_number, group.spec.requeues


def build_train_batch(
    step: int,
    attempts: Iterable[Trajectory],
    settings: StepSettings | None = None,
    scores: Mapping[AttemptKey, Sequence[TeacherScores]] | None = None,
) -> TrainBatch:
    """Build the batch that the ranks train on in `step`: a function of the plan, and of the scores
    that were journaled with it, alone (I5)."""
    trained = list(attempts)
    rows: list[TrainSequence] = []
    for attempt in trained:
        own = _train_sequences(step, attempt)
        if scores is not None:
            pairs = zip(own, scores[attempt.key], strict=True)
            own = [replace(row, teacher=each) for row, each in pairs]
        rows += own
    files = {name: data for attempt in trained for name, data in attempt.pictures.items()}
    return TrainBatch(step, tuple(rows), settings or StepSettings(), files)


def _train_sequences(step: int, attempt: Trajectory) -> list[TrainSequence]:
    if attempt.reward is None or not attempt.sequences:
        raise ValueError(f"{attempt.key} cannot be trained on: it has no reward or no tokens")
    versions = [policy.version for policy in attempt.policies]
    staleness = step - 1 - min(versions, default=step - 1)
    rows = [
        make_train_sequence(attempt, attempt.reward, sequence, staleness)
        for sequence in attempt.sequences
    ]
    return [
        replace(row, turns=turns) for row, turns in zip(rows, split_turns(attempt), strict=True)
    ]


def split_turns(attempt: Trajectory) -> list[tuple[TurnTokens, ...]]:
    """Return the policy tokens of each sequence by turn.

    There are none if no turn was rewarded, or if turns and sequences have different numbers of
    tokens, so that it is unknown which tokens a turn wrote. What no attempt's reward may be is no
    reward of a turn."""
    turns, counts = attempt.turns, [len(sequence.logprobs) for sequence in attempt.sequences]
    tokens = [turn.generated_tokens for turn in turns]
    rewards = [turn.usable_reward for turn in turns]
    if all(reward is None for reward in rewards) or sum(tokens) != sum(counts):
        return [() for _ in counts]
    pieces = np.split(np.repeat(np.arange(len(turns)), tokens), np.cumsum(counts)[:-1])
    runs = [zip(*np.unique(piece, return_counts=True), strict=True) for piece in pieces]
    return [
        tuple(TurnTokens(int(turn), int(count), rewards[turn]) for turn, count in run)
        for run in runs
    ]


def make_train_sequence(
    attempt: Trajectory, reward: float, sequence: Sampled, staleness: int
) -> TrainSequence:
    """Return one of an attempt's sequences as the ranks take it."""
    mask = policy_mask(sequence.spans)
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = sequence.logprobs
    temperatures = [s.temperature for s in sequence.spans if s.temperature is not None]
    return TrainSequence(
        group_id=attempt.key.group_id,
        attempt_index=attempt.key.attempt_index,
        reward=reward,
        token_ids=sequence.token_ids.astype(np.int32),
        policy_mask=mask,
        behaviour_logprobs=logprobs,
        temperature=temperatures[0] if temperatures else 1.0,
        staleness=staleness,
        stop_reason=attempt.stop_reason or StopReason.DONE,
        experts=sequence.experts,
        pictures=tuple(item.place for item in sequence.pictures),
        named_rewards=attempt.named_rewards,
        candidates=sequence.candidates,
    )
