"""Off-policy corrections and overlong attempts: what they take away, and from whom."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_common.domain.attempts import StopReason
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.types import StepSettings, TrainBatch, TrainSequence
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import changed, make_batch, parameters, same_bits, train

DECOUPLED: dict[str, Any] = {"proximal": "trainer"}


@pytest.fixture(scope="module")
def initial(model_folder: Path) -> Policy:
    return load_policy(policy_config(model_folder), RankConfig())


@pytest.fixture
def batch(initial: Policy) -> TrainBatch:
    return make_batch(initial)


def off(batch: TrainBatch, log_ratio: float) -> TrainBatch:
    """Return the batch as if the sampler had found every token less likely by so much."""

    def shifted(s: TrainSequence) -> TrainSequence:
        return replace(s, behaviour_logprobs=s.behaviour_logprobs - log_ratio * s.policy_mask)

    return replace(batch, sequences=tuple(shifted(s) for s in batch.sequences))


@pytest.mark.parametrize(("key", "ratio"), [("token_tis", 0.5), ("sequence_tis", 0.01)])
def test_truncated_importance_sampling_weighs_up_to_its_cap(
    model_folder: Path, batch: TrainBatch, key: str, ratio: float
) -> None:
    likelier = off(batch, ratio)
    plain = train(model_folder, likelier, **DECOUPLED).metrics
    low, high = (
        train(model_folder, likelier, **DECOUPLED, correction={key: cap}).metrics
        for cap in (1.05, 5.0)
    )
    weights = [m["policy/correction_weight"] for m in (plain, low, high)]
    assert weights[0] == 1.0
    assert 1.0 < weights[1] < weights[2]
    assert weights[1] <= 1.05001
    assert plain["policy/grad_norm"] < low["policy/grad_norm"] < high["policy/grad_norm"]


def test_an_unlikely_token_weighs_less_in_truncated_importance_sampling(
    model_folder: Path, batch: TrainBatch
) -> None:
    metrics = [
        train(model_folder, off(batch, shift), **DECOUPLED, correction={"token_tis": 2.0}).metrics
        for shift in (0.0, -np.log(4))
    ]
    assert metrics[1]["policy/grad_norm"] == pytest.approx(
        metrics[0]["policy/grad_norm"] / 4, rel=1e-3
    )


@pytest.mark.parametrize(
    ("correction", "inside", "outside"),
    [
        ({"token_mask": [0.8, 1.25]}, 0.2, 0.25),
        ({"token_mask": [0.8, 1.25]}, -0.2, -0.25),
        ({"sequence_mask_geometric": [0.9, 1.1]}, 0.09, 0.11),
        ({"sequence_mask_product": [1e-6, 1.5]}, 0.001, 0.2),
    ],
)
def test_what_lies_outside_of_the_bounds_moves_nothing(
    model_folder: Path, batch: TrainBatch, correction: object, inside: float, outside: float
) -> None:
    within, beyond = (
        train(model_folder, off(batch, shift), **DECOUPLED, correction=correction)
        for shift in (inside, outside)
    )
    assert within.metrics["mismatch/masked_fraction"] == 0.0 < within.metrics["policy/grad_norm"]
    assert beyond.metrics["mismatch/masked_fraction"] == 1.0
    assert beyond.metrics["mismatch/masked_sequences"] == 1.0
    assert (beyond.metrics["policy/loss"], beyond.metrics["policy/grad_norm"]) == (0.0, 0.0)


def test_a_geometric_mask_forgives_one_token_that_a_token_mask_does_not(
    model_folder: Path, batch: TrainBatch
) -> None:
    def one_off(s: TrainSequence) -> TrainSequence:
        logprobs = s.behaviour_logprobs.copy()
        logprobs[np.flatnonzero(s.policy_mask)[0]] -= 0.4
        return replace(s, behaviour_logprobs=logprobs)

    odd = replace(batch, sequences=tuple(one_off(s) for s in batch.sequences))
    masked = {
        key: train(model_folder, odd, correction={key: [0.8, 1.25]}).metrics[
            "mismatch/masked_fraction"
        ]
        for key in ("token_mask", "sequence_mask_geometric", "sequence_mask_product")
    }
    tokens = sum(int(s.policy_mask.sum()) for s in odd.sequences)
    assert masked["token_mask"] == pytest.approx(len(odd.sequences) / tokens)
    assert masked["sequence_mask_geometric"] == 0.0
    assert masked["sequence_mask_product"] == 1.0


def test_stale_sequences_weigh_less(model_folder: Path, batch: TrainBatch) -> None:
    def norm(staleness: int, decay: float) -> float:
        stale = changed(batch, staleness=staleness)
        correction = {"staleness_decay": decay}
        return train(model_folder, stale, correction=correction).metrics["policy/grad_norm"]

    assert norm(0, 0.5) == norm(2, 1.0)
    assert norm(2, 0.5) == pytest.approx(norm(0, 0.5) / 4, rel=1e-4)


def test_the_ratio_limit_of_a_step_masks_on_top(model_folder: Path, batch: TrainBatch) -> None:
    likelier = off(batch, 0.2)
    limited = replace(likelier, settings=StepSettings(ratio_limit=1.1))
    free, held = train(model_folder, likelier), train(model_folder, limited)
    assert (free.metrics["mismatch/masked_fraction"], free.metrics["policy/updates"]) == (0.0, 1.0)
    assert held.metrics["mismatch/masked_fraction"] == 1.0
    assert held.metrics["policy/grad_norm"] == 0.0


def test_masks_are_those_of_the_steps_start_in_every_epoch(
    model_folder: Path, batch: TrainBatch
) -> None:
    """The policy moves out of the bounds in the first epoch; that must mask nothing."""
    tight: dict[str, Any] = {
        "correction": {"token_mask": [0.99, 1.01]},
        "epochs": 3,
        "clip_high": 9.0,
    }
    far = train(model_folder, batch, lr=3e-2, **tight)
    assert far.metrics["mismatch/masked_fraction"] == 0.0
    assert far.metrics["policy/post_update_kl"] > 0.01


# --- overlong attempts


def policy_tokens(sequence: TrainSequence) -> int:
    return int(sequence.policy_mask.sum())


def long(sequence: TrainSequence) -> bool:
    return len(sequence.token_ids) > 25


def cut_off(batch: TrainBatch) -> TrainBatch:
    """Whatever is long was cut off."""
    return replace(
        batch,
        sequences=tuple(
            replace(s, stop_reason=StopReason.MAX_TURNS if long(s) else StopReason.DONE)
            for s in batch.sequences
        ),
    )


@pytest.mark.parametrize(
    "overlong", [{"mask_stop_reasons": ["max_turns"]}, {"mask_above_tokens": 25}]
)
def test_masked_attempts_carry_no_gradient_and_do_not_count_in_the_mean(
    model_folder: Path, batch: TrainBatch, overlong: object
) -> None:
    batch = cut_off(batch)
    masked = train(model_folder, batch, overlong=overlong)
    plain = train(model_folder, batch)
    assert not same_bits(parameters(masked.policy), parameters(plain.policy))
    left = [s for s in batch.sequences if not long(s)]
    assert 0 < len(left) < len(batch.sequences)
    assert masked.result.versions[0].tokens == sum(policy_tokens(s) for s in left)
    # On policy the loss is minus the mean advantage over the tokens that are left.
    assert masked.metrics["policy/loss"] == pytest.approx(-mean_advantage(batch, left), abs=1e-5)


def mean_advantage(batch: TrainBatch, left: list[TrainSequence]) -> float:
    """Advantages belong to whole groups, masked attempts included."""
    total, tokens = 0.0, 0
    for s in left:
        rewards = np.array([o.reward for o in batch.sequences if o.group_id == s.group_id])
        advantage = (s.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        total += float(advantage) * policy_tokens(s)
        tokens += policy_tokens(s)
    return total / tokens


def test_a_batch_that_is_masked_altogether_moves_nothing(
    model_folder: Path, initial: Policy, batch: TrainBatch
) -> None:
    step = train(model_folder, batch, overlong={"mask_above_tokens": 1})
    assert step.metrics["policy/updates"] == 0.0
    assert same_bits(parameters(step.policy), parameters(initial))


def grad_norm(folder: Path, batch: TrainBatch, **overlong: object) -> float:
    step = train(folder, batch, advantage="dr_grpo", overlong=overlong)
    return step.metrics["policy/grad_norm"]


def test_the_soft_penalty_makes_long_attempts_less_likely(
    model_folder: Path, initial: Policy, batch: TrainBatch
) -> None:
    equal = changed(batch, reward=1.0)
    counts = [policy_tokens(s) for s in equal.sequences]
    overlong = {"soft_limit": max(counts), "soft_buffer": max(counts) - min(counts)}
    step = train(model_folder, equal, overlong=overlong, advantage="dr_grpo")
    ordered = sorted(equal.sequences, key=policy_tokens)
    assert step.gain(initial, ordered[:3]) > 0 > step.gain(initial, ordered[-3:])


def test_limit_buffer_and_weight_of_the_soft_penalty_shape_it(
    model_folder: Path, batch: TrainBatch
) -> None:
    equal = changed(batch, reward=1.0)
    counts = sorted(policy_tokens(s) for s in equal.sequences)
    limit, buffer = counts[-1], counts[-1] - counts[0]
    single = grad_norm(model_folder, equal, soft_limit=limit, soft_buffer=buffer)
    double = grad_norm(model_folder, equal, soft_limit=limit, soft_buffer=buffer, soft_weight=2.0)
    assert double == pytest.approx(2 * single, rel=1e-4)
    # Up to soft_limit - soft_buffer there is no penalty.
    assert grad_norm(model_folder, equal, soft_limit=limit + 9, soft_buffer=9) == 0.0
    assert grad_norm(model_folder, equal, soft_limit=limit, soft_buffer=1) > 0
