from dataclasses import replace

import numpy as np
import pytest

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.hosted import datums
from flotilla_learner.hosted.step_result import prepare
from flotilla_learner.rank.step_examples import PreparedBatch
from flotilla_learner.training_types import AdamUpdate, TargetBatch
from flotilla_learner.types import TrainBatch
from tests.learner.hosted.hosted_runs import learner_config, policy_config, train_batch

ADAM = AdamUpdate(1e-3, 0.9, 0.95, 1e-8, 0.0, 1.0)


def algorithm_of(**changes: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(changes)


def prepared_of(batch: TrainBatch, algorithm: AlgorithmConfig) -> PreparedBatch:
    return prepare(batch, algorithm, policy_config("http://127.0.0.1"))


def test_a_row_has_shifted_targets_and_weighted_advantages() -> None:
    batch, algorithm = train_batch(), algorithm_of()
    prepared = prepared_of(batch, algorithm)
    (part,) = datums.moving_parts(prepared)
    order = datums.loss_batch(part, algorithm)
    assert (order.loss, order.forward_only) == ("ppo", False)
    assert order.options == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    tokens = sum(int(each.policy_mask.sum()) for each in batch.sequences)
    for example, row in zip(part, order.sequences, strict=True):
        sequence = batch.sequences[example.row.index]
        length = len(row.token_ids) + 1
        assert row.token_ids.tolist() == sequence.token_ids[: length - 1].tolist()
        assert row.target_ids.tolist() == sequence.token_ids[1:length].tolist()
        mask = sequence.policy_mask[1:length]
        assert row.inputs["logprobs"] == pytest.approx(sequence.behaviour_logprobs[1:length])
        advantages = row.inputs["advantages"]
        assert not advantages[~mask].any()
        # The mean over all tokens of the batch.
        expected = prepared.advantages[example.row.index] / tokens
        assert advantages[mask] == pytest.approx(expected, rel=1e-6)


def test_gspo_takes_the_ratio_over_the_policys_tokens() -> None:
    algorithm = algorithm_of(loss="gspo")
    (part,) = datums.moving_parts(prepared_of(train_batch(), algorithm))
    for row in datums.loss_batch(part, algorithm).sequences:
        assert (row.inputs["sequence_ratio_mask"] == (row.inputs["advantages"] != 0)).all()


def test_importance_sampling_has_no_clip() -> None:
    algorithm = algorithm_of(loss="importance_sampling")
    (part,) = datums.moving_parts(prepared_of(train_batch(), algorithm))
    assert datums.loss_batch(part, algorithm).options == {}


def test_a_step_has_a_loss_and_an_update_for_each_epoch_and_mini_batch() -> None:
    algorithm = algorithm_of(epochs=2, mini_batches=3)
    parts = datums.moving_parts(prepared_of(train_batch(), algorithm))
    orders = datums.step_orders(parts, algorithm, ADAM)
    kinds = [type(order) for order in orders]
    assert kinds == [TargetBatch, AdamUpdate] * 6
    counted = sum(len(each.row.token_ids) - 1 for part in parts for each in part)
    assert datums.trained_tokens(orders) == 2 * counted


def test_sequences_without_a_signal_are_not_sent() -> None:
    batch = train_batch()
    flat = [
        replace(each, reward=1.0) if each.group_id == "g1" else each for each in batch.sequences
    ]
    algorithm = algorithm_of(mini_batches=3)
    prepared = prepared_of(replace(batch, sequences=tuple(flat)), algorithm)
    assert len(prepared.mini_batches) == 3
    assert len(datums.moving_parts(prepared)) == 2


def test_nothing_beyond_the_longest_sequence_is_trained_on() -> None:
    batch = train_batch(longest=60)
    cut, count = datums.cut_sequences(batch, 20)
    long = [each for each in batch.sequences if each.policy_mask[20:].any()]
    assert count == len(long) > 0
    algorithm = algorithm_of()
    for part in datums.moving_parts(prepared_of(cut, algorithm)):
        for row in datums.loss_batch(part, algorithm).sequences:
            assert len(row.token_ids) < 20


def test_the_rate_follows_the_runs_schedule() -> None:
    config = learner_config(optimizer={"lr": 1e-2, "warmup_steps": 4, "grad_clip": 0.5}).optimizer
    update = datums.adam_update(config, 1, 10)
    assert update == AdamUpdate(2.5e-3, 0.9, 0.95, 1e-8, 0.0, 0.5)


def test_a_digest_covers_everything_that_is_ordered() -> None:
    algorithm = algorithm_of()
    parts = datums.moving_parts(prepared_of(train_batch(), algorithm))
    orders = datums.step_orders(parts, algorithm, ADAM)
    assert datums.digest_of(orders) == datums.digest_of(datums.step_orders(parts, algorithm, ADAM))
    batch = orders[0]
    assert isinstance(batch, TargetBatch)
    row = batch.sequences[0]
    other_ids = replace(row, token_ids=row.token_ids + 1)
    other_inputs = replace(row, inputs={**row.inputs, "logprobs": row.inputs["logprobs"] - 1})
    changed = [
        replace(batch, loss="cispo"),
        replace(batch, options={}),
        replace(batch, sequences=[other_ids, *batch.sequences[1:]]),
        replace(batch, sequences=[other_inputs, *batch.sequences[1:]]),
        replace(batch, sequences=batch.sequences[1:]),
    ]
    found = {datums.digest_of([each, *orders[1:]]) for each in (batch, *changed)}
    found |= {datums.digest_of([batch, replace(ADAM, learning_rate=1.0)])}
    assert len(found) == 7


def test_a_turn_reads_all_tokens_before_it() -> None:
    batch = train_batch()
    sampled, prompts = datums.sampled_and_prompt_tokens(batch)
    assert sampled == sum(int(each.policy_mask.sum()) for each in batch.sequences)
    # Two turns in each sequence, which begin at these places.
    assert prompts == (4 + 9) * len(batch.sequences)


def test_the_scored_canary_has_a_target_for_all_but_its_first_token() -> None:
    (row,) = datums.scored_batch(np.arange(5, dtype=np.int32)).sequences
    assert (row.token_ids.tolist(), row.target_ids.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
