import math

import numpy as np
import pytest
import torch

from services.learner.algo.losses import LossInput, TokenLoss
from services.learner.algo.losses import ppo_clip as ppo_clip_of
from services.learner.algo.masks import predicting_positions, within_ratio
from services.learner.algo.mismatch import Mismatch, measure
from services.learner.algo.reductions import REDUCTIONS
from services.learner.algorithm_config import AlgorithmConfig


def ppo_clip(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    one = torch.zeros(len(logprobs), dtype=torch.int64)
    return ppo_clip_of(LossInput(logprobs, old, advantages, one, 1), AlgorithmConfig())


def slope(ratio: float, advantage: float) -> tuple[float, bool]:
    """d loss / d logprob of one token with this ratio, and whether it was clipped."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = ppo_clip(
        logprobs, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage]).double()
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return float(gradient), bool(result.clipped)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_on_policy_the_gradient_is_that_of_reinforce(advantage: float) -> None:
    assert slope(1.0, advantage) == (-advantage, False)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.27, 1.0, False),
        (1.29, 1.0, True),
        (0.5, 1.0, False),
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (3.0, -1.0, False),
    ],
)
def test_the_clip_stops_moves_away_from_the_sampler_and_no_other(
    ratio: float, advantage: float, clipped: bool
) -> None:
    gradient, was_clipped = slope(ratio, advantage)
    assert was_clipped is clipped
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_an_absurd_ratio_stays_finite() -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    result = ppo_clip(logprobs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]))
    assert torch.isfinite(result.loss).all()


def test_ppo_clip_passes_the_numerical_gradient_check() -> None:
    torch.manual_seed(0)
    behaviour = torch.randn(40, dtype=torch.float64) * 0.3 - 2
    advantages = torch.randn(40, dtype=torch.float64)
    logprobs = (behaviour + torch.randn(40, dtype=torch.float64) * 0.3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, behaviour, advantages).loss, logprobs)


def test_token_mean_weighs_every_token_of_the_batch_alike() -> None:
    assert REDUCTIONS["token_mean"]([3, 1], 9).tolist() == [0.25, 0.25]


def test_sequence_mean_weighs_every_sequence_alike() -> None:
    assert REDUCTIONS["sequence_mean"]([4, 1], 9).tolist() == [0.125, 0.5]


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_weights_add_up_to_one(name: str) -> None:
    lengths = [5, 1, 17]
    assert np.dot(REDUCTIONS[name](lengths, 9), lengths) == pytest.approx(1.0)


def test_the_token_before_each_policy_token_predicts_it() -> None:
    mask = np.array([False, False, True, True, False, True])
    assert predicting_positions(mask).tolist() == [1, 2, 4]


def test_a_policy_cannot_have_written_the_first_token() -> None:
    with pytest.raises(ValueError, match="first token"):
        predicting_positions(np.array([True, False]))


def test_tokens_that_the_trainer_cannot_explain_are_masked() -> None:
    logprobs = torch.tensor([0.0, 0.0, 0.0])
    behaviour = torch.tensor([math.log(3.0), -math.log(3.0), 0.5])
    assert within_ratio(logprobs, behaviour, (0.5, 2.0)).tolist() == [False, False, True]
    assert within_ratio(logprobs, behaviour, None).all()


def test_mismatch_in_closed_form_and_added_over_micro_batches() -> None:
    logprobs = torch.tensor([math.log(2.0), 0.0, -1.0])
    behaviour = torch.tensor([0.0, 0.0, -0.5])
    kept = torch.tensor([True, True, False])
    whole = measure(logprobs, behaviour, kept)
    halves = measure(logprobs[:1], behaviour[:1], kept[:1]) + measure(
        logprobs[1:], behaviour[1:], kept[1:]
    )
    metrics = whole.metrics()
    assert halves.metrics() == pytest.approx(metrics)
    assert metrics["mismatch/is_ratio_max"] == pytest.approx(2.0)
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx((math.log(2) + 0.5) / 3)
    k3 = (2 - 1 - math.log(2)) + (math.exp(-0.5) - 1 + 0.5)
    assert metrics["mismatch/kl_train_infer"] == pytest.approx(k3 / 3, rel=1e-6)
    assert metrics["mismatch/masked_fraction"] == pytest.approx(1 / 3)
    assert Mismatch().metrics() == {}
