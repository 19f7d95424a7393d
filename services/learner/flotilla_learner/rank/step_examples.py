"""Examples of a step's updates, decided on the whole batch before the first update; no model.

Scores by models are given to it: see `step_preparation.py` for those of our own ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from flotilla_learner.algo.advantages import ADVANTAGES, BatchRewards, critic_targets
from flotilla_learner.algo.distillation import reverse_kl_advantages
from flotilla_learner.algo.held_tokens import TokenChoice, UpdateTokens
from flotilla_learner.algo.kl import kl_rewards
from flotilla_learner.algo.losses import LOSSES
from flotilla_learner.algo.overlong import not_overlong_mask, soft_penalties
from flotilla_learner.algo.reductions import REDUCTIONS
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.rank.rows import ByRow, Row, split_groups
from flotilla_learner.types import TeacherScores, TrainBatch

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrainExample:
    """A row and its training targets; every array is [policy tokens]."""

    row: Row
    advantages: Values
    # True if it has a gradient for the policy.
    moves: bool
    # Weight of each of its tokens in the losses.
    weight: float = 0.0
    # Logprobs of the policy at the start of the step, and of the reference.
    proximal: NDArray[np.float32] | None = None
    reference: NDArray[np.float32] | None = None
    # The critic's values before the step, and their targets.
    values: NDArray[np.float32] | None = None
    returns: Values | None = None
    # Tokens that the loss holds back, if it chooses any.
    held: NDArray[np.bool_] | None = None
    teacher: TeacherScores | None = None


@dataclass(slots=True)
class ModelScores:
    """Scores of rows by each model, by place in the batch; empty if not needed."""

    proximal: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    reference: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    # None without a critic.
    values: ByRow | None = None


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch, ready for its updates."""

    # Trained examples by mini-batch: whole groups, in batch order.
    mini_batches: list[list[TrainExample]]
    # For every sequence of the batch.
    advantages: list[Values]

    @property
    def examples(self) -> list[TrainExample]:
        return [example for part in self.mini_batches for example in part]


@dataclass(frozen=True, slots=True)
class BatchTargets:
    """What each sequence of a batch is worth, and which of them are trained on."""

    # For every sequence of the batch.
    advantages: list[Values]
    # The critic's targets, likewise; None without a critic.
    returns: Sequence[Values] | None
    # Rows that are not masked as overlong, and places of those that have a gradient.
    kept: list[Row]
    moving: frozenset[int]

    @property
    def chosen(self) -> list[Row]:
        """Rows that have a gradient."""
        return [row for row in self.kept if row.index in self.moving]


def rows_of(batch: TrainBatch) -> list[Row]:
    return [Row.from_sequence(index, sequence) for index, sequence in enumerate(batch.sequences)]


def find_targets(
    batch: TrainBatch,
    rows: Sequence[Row],
    scored: ModelScores,
    algorithm: AlgorithmConfig,
    *,
    everywhere: bool = False,
) -> BatchTargets:
    """Return the targets of a batch; with `everywhere`, tokens without an advantage move too. Every
    token of a demonstration has advantage 1.

    Raises ValueError for rewards that cannot be compared, and for a sequence of a taught step that
    the teacher has not scored."""
    rewards = _batch_rewards(batch, rows, scored, algorithm)
    if batch.imitated:
        advantages = [np.ones(len(row.positions)) for row in rows]
    elif batch.settings.taught:
        advantages = _taught_advantages(batch, rows, rewards, algorithm)
    else:
        advantages = ADVANTAGES.get(algorithm.advantage)(rewards, algorithm)
    returns = critic_targets(rewards, algorithm) if scored.values is not None else None
    mask = not_overlong_mask(
        [s.stop_reason for s in batch.sequences],
        [len(s.token_ids) for s in batch.sequences],
        algorithm.overlong,
    )
    kept = [row for row, keep in zip(rows, mask, strict=True) if keep]
    moving = (row.index for row in kept if everywhere or np.any(advantages[row.index]))
    return BatchTargets(advantages, returns, kept, frozenset(moving))


def make_examples(
    batch: TrainBatch,
    targets: BatchTargets,
    scored: ModelScores,
    algorithm: AlgorithmConfig,
    norm_tokens: int,
) -> PreparedBatch:
    """Return the examples in mini-batches. `norm_tokens` is the constant of the reduction
    sequence_mean_token_sum_norm.

    A loss that chooses tokens needs the proximal logprobs of all kept rows."""
    examples = {
        row.index: _make_example(batch, row, targets, scored)
        for row in targets.kept
        if len(row.positions)
    }
    parts = _mini_batches(batch, examples, algorithm, norm_tokens)
    if (choice := LOSSES.find_choice(algorithm.loss)) is not None:
        # Every rank draws the same.
        parts = [
            _hold_tokens(part, choice, algorithm, np.random.default_rng([batch.step, place]))
            for place, part in enumerate(parts)
        ]
    return PreparedBatch(parts, targets.advantages)


def norm_tokens_of(algorithm: AlgorithmConfig, max_model_len: int | None) -> int:
    """Return the constant of the reduction sequence_mean_token_sum_norm; others ignore it.

    Raises ValueError if it is not known."""
    if algorithm.norm_tokens is not None:
        return algorithm.norm_tokens
    if max_model_len is not None:
        return max_model_len
    if algorithm.reduction == "sequence_mean_token_sum_norm":
        raise ValueError("algorithm.norm_tokens: set it, because the model has no max_model_len")
    return 1


def _batch_rewards(
    batch: TrainBatch, rows: Sequence[Row], scored: ModelScores, algorithm: AlgorithmConfig
) -> BatchRewards:
    """Return the batch's rewards, minus penalties for length and for leaving the reference."""
    sequences = batch.sequences
    groups = [s.group_id for s in sequences]
    attempts = [s.attempt_index for s in sequences]
    counts = [len(row.positions) for row in rows]
    penalties = soft_penalties(groups, attempts, counts, algorithm.overlong)
    token_rewards = [np.zeros(count) for count in counts]
    for index, proximal in scored.proximal.items():
        policy, reference = (
            torch.from_numpy(logprobs).double() for logprobs in (proximal, scored.reference[index])
        )
        token_rewards[index] = kl_rewards(policy, reference, algorithm.kl).numpy()
    earned = [s.reward + float(p) for s, p in zip(sequences, penalties, strict=True)]
    return BatchRewards(
        groups,
        attempts,
        earned,
        token_rewards,
        _row_values(rows, scored),
        [s.turns for s in sequences],
        [s.named_rewards for s in sequences],
    )


def _taught_advantages(
    batch: TrainBatch, rows: Sequence[Row], rewards: BatchRewards, algorithm: AlgorithmConfig
) -> list[Values]:
    """Return the advantages of a step with a teacher: those of the rewards, unless it teaches
    alone, plus its own."""
    scores = [sequence.teacher for sequence in batch.sequences]
    for row, each in zip(rows, scores, strict=True):
        if each is None or len(each.logprobs) != len(row.positions):
            raise ValueError(
                f"sequence {row.index} of step {batch.step} lacks the teacher's scores"
            )
    chosen = algorithm.distillation
    if chosen.alone:
        advantages = [np.zeros(len(row.positions)) for row in rows]
    else:
        advantages = ADVANTAGES.get(algorithm.advantage)(rewards, algorithm)
    if chosen.top_k:
        # The teacher's term is one of the loss.
        return advantages
    return [
        own + reverse_kl_advantages(each.logprobs, row.behaviour, chosen.weight)
        for own, row, each in zip(advantages, rows, scores, strict=True)
        if each is not None
    ]


def _row_values(rows: Sequence[Row], scored: ModelScores) -> list[Values] | None:
    """Return the critic's values of each row: none for a row without a policy token."""
    if scored.values is None:
        return None
    none = np.zeros(0, np.float32)
    return [scored.values.get(row.index, none).astype(np.float64) for row in rows]


def _mini_batches(
    batch: TrainBatch,
    examples: Mapping[int, TrainExample],
    algorithm: AlgorithmConfig,
    norm_tokens: int,
) -> list[list[TrainExample]]:
    """Return the examples by mini-batch, weighted within it; the others count for nothing."""
    reduce = REDUCTIONS[algorithm.reduction]
    groups = [sequence.group_id for sequence in batch.sequences]
    counts = [len(examples[i].row.positions) if i in examples else 0 for i in range(len(groups))]
    found: list[list[TrainExample]] = []
    for part in split_groups(groups, algorithm.mini_batches):
        weights = reduce([counts[place] for place in part], norm_tokens)
        pairs = zip(part, weights.tolist(), strict=True)
        found.append([replace(examples[i], weight=w) for i, w in pairs if i in examples])
    return found


def _hold_tokens(
    part: Sequence[TrainExample],
    choice: TokenChoice,
    algorithm: AlgorithmConfig,
    draw: np.random.Generator,
) -> list[TrainExample]:
    """Return the examples of a mini-batch with the tokens that the loss holds back."""
    if not part:
        return []
    logprobs = _concat([example.proximal for example in part])
    behaviour = _concat([example.row.behaviour for example in part])
    tokens = UpdateTokens(
        _concat([example.advantages for example in part]),
        logprobs,
        behaviour if algorithm.proximal == "behaviour" else logprobs,
    )
    ends = np.cumsum([len(example.advantages) for example in part])[:-1]
    held = np.split(choice(tokens, algorithm, draw), ends)
    return [replace(example, held=own) for example, own in zip(part, held, strict=True)]


def _concat(arrays: Sequence[NDArray[np.floating] | None]) -> Values:
    return np.concatenate([array for array in arrays if array is not None]).astype(np.float64)


def _make_example(
    batch: TrainBatch, row: Row, targets: BatchTargets, scored: ModelScores
) -> TrainExample:
    values, returns = scored.values or {}, targets.returns
    return TrainExample(
        row,
        targets.advantages[row.index],
        row.index in targets.moving,
        proximal=scored.proximal.get(row.index),
        reference=scored.reference.get(row.index),
        values=values.get(row.index),
        returns=returns[row.index] if returns is not None else None,
        teacher=batch.sequences[row.index].teacher,
    )
