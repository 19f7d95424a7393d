"""A step as orders to the service: batches of rows with shifted targets, and updates.

A service sums its losses over tokens, and each is linear in the advantage: so the weight that our
reduction gives a token is multiplied into its advantage, and the sum is our loss."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.hosted import SERVICE_LOSSES
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.hosted.ports import Order
from flotilla_learner.rank.learning_rate import learning_rate
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.step_examples import PreparedBatch, TrainExample
from flotilla_learner.training_types import AdamUpdate, TargetBatch, TargetSequence
from flotilla_learner.types import TrainBatch, TrainSequence


def cut_sequences(batch: TrainBatch, most_tokens: int) -> tuple[TrainBatch, int]:
    """Return a batch without policy tokens beyond `most_tokens`, which cannot be trained on, and
    how many sequences had some."""
    count = sum(bool(each.policy_mask[most_tokens:].any()) for each in batch.sequences)
    cut = tuple(_cut(each, most_tokens) for each in batch.sequences)
    return replace(batch, sequences=cut), count


def _cut(sequence: TrainSequence, most_tokens: int) -> TrainSequence:
    mask = sequence.policy_mask.copy()
    mask[most_tokens:] = False
    return replace(sequence, policy_mask=mask)


def moving_parts(prepared: PreparedBatch) -> list[list[TrainExample]]:
    """Return the examples that have a gradient, by mini-batch, without mini-batches of none."""
    parts = ([each for each in part if each.moves] for part in prepared.mini_batches)
    return [part for part in parts if part]


def step_orders(
    parts: Sequence[Sequence[TrainExample]], algorithm: AlgorithmConfig, adam: AdamUpdate
) -> list[Order]:
    """Return a step's orders: for each epoch and mini-batch its loss, then an update."""
    once: list[Order] = []
    for part in parts:
        once += [loss_batch(part, algorithm), adam]
    return once * algorithm.epochs


def loss_batch(examples: Sequence[TrainExample], algorithm: AlgorithmConfig) -> TargetBatch:
    """Return the batch of a mini-batch's examples."""
    loss = SERVICE_LOSSES[algorithm.loss]
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    clips = {"clip_low_threshold": low, "clip_high_threshold": high}
    options = {} if loss == "importance_sampling" else clips
    return TargetBatch(loss, options, [_loss_row(each, loss) for each in examples])


def _loss_row(example: TrainExample, loss: str) -> TargetSequence:
    row, weighted = example.row, example.advantages * example.weight
    inputs = {"logprobs": _placed(row, row.behaviour), "advantages": _placed(row, weighted)}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = _placed(row, np.ones(len(row.positions)))
    return _shifted(row.token_ids, inputs)


def _placed(row: Row, values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return values of the policy tokens at the positions that predict them, 0 elsewhere."""
    placed = np.zeros(len(row.token_ids) - 1, np.float32)
    placed[row.positions] = values
    return placed


def scored_batch(token_ids: NDArray[np.int32]) -> TargetBatch:
    """Return a batch that has one sequence scored, token by token, and nothing trained."""
    weights = np.ones(len(token_ids) - 1, np.float32)
    row = _shifted(token_ids, {"weights": weights})
    return TargetBatch("cross_entropy", MappingProxyType({}), [row], forward_only=True)


def _shifted(
    token_ids: NDArray[np.int32], inputs: Mapping[str, NDArray[np.float32]]
) -> TargetSequence:
    return TargetSequence(token_ids[:-1], token_ids[1:].astype(np.int64), inputs)


def adam_update(config: OptimizerConfig, step: int, total_steps: int) -> AdamUpdate:
    """Return the update of a step, with the rate of its schedule."""
    return AdamUpdate(
        learning_rate(config, step, total_steps),
        *config.betas,
        config.eps,
        config.weight_decay,
        config.grad_clip,
    )


def digest_of(orders: Sequence[Order]) -> str:
    """Return a digest of everything that the orders say."""
    return _digest(_parts_of_orders(orders))


def digest_of_batch(batch: TrainBatch) -> str:
    """Return a digest of the data that a step is made of."""
    return _digest(_parts_of_batch(batch))


def _digest(parts: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts_of_batch(batch: TrainBatch) -> Iterator[bytes]:
    for each in batch.sequences:
        yield repr((each.group_id, each.attempt_index, each.reward)).encode()
        for values in (each.token_ids, each.policy_mask, each.behaviour_logprobs):
            yield values.tobytes()


def _parts_of_orders(orders: Sequence[Order]) -> Iterator[bytes]:
    for order in orders:
        if not isinstance(order, TargetBatch):
            yield repr((type(order).__name__, astuple(order))).encode()
            continue
        yield repr((order.loss, sorted(order.options.items()), order.forward_only)).encode()
        for row in order.sequences:
            arrays = [("", row.token_ids), ("targets", row.target_ids), *sorted(row.inputs.items())]
            for name, values in arrays:
                yield name.encode()
                yield values.tobytes()


def trained_tokens(orders: Sequence[Order]) -> int:
    """Return the tokens that the service computes gradients for, prompts included."""
    batches = [order for order in orders if isinstance(order, TargetBatch)]
    return sum(len(row.token_ids) for batch in batches for row in batch.sequences)


def sampled_and_prompt_tokens(batch: TrainBatch) -> tuple[int, int]:
    """Return how many tokens a batch's policies sampled, and how many they read before: each turn
    begins with all tokens that came before it."""
    sampled = prompts = 0
    for sequence in batch.sequences:
        mask = sequence.policy_mask
        begins = mask & ~np.concatenate([[False], mask[:-1]])
        sampled += int(mask.sum())
        prompts += int(np.flatnonzero(begins).sum())
    return sampled, prompts
