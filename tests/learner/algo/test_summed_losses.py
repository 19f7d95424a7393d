"""Each loss by hand; tests/learner/rank/test_serving_rank.py compares gradients through a model."""

import math

import pytest
import torch
from torch import Tensor

from flotilla_learner.algo.summed_losses import COUPLED, SUMMED_LOSSES, TargetInputs
from flotilla_learner.training.batch_checks import LOSSES
from tests.support.target_batches import OPTIONS


def loss_of(name: str, at: list[float], **inputs: list[float]) -> tuple[Tensor, Tensor]:
    """The losses of the tokens of one sequence, and the gradient of their sum."""
    leaf = torch.tensor(at, dtype=torch.float64).requires_grad_()
    arrays = {key: torch.tensor(value, dtype=torch.float64) for key, value in inputs.items()}
    one = torch.zeros(len(at), dtype=torch.int64)
    found = SUMMED_LOSSES[name](leaf, TargetInputs(arrays, OPTIONS[name], one, 1))
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    return found.detach(), gradient


def test_each_has_rules_for_what_it_takes() -> None:
    assert list(SUMMED_LOSSES) == list(LOSSES)
    assert {name: dict(rule.options) for name, rule in LOSSES.items()} == OPTIONS
    assert set(LOSSES) >= COUPLED


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "slope"),
    [
        ("importance_sampling", 1.5, 2.0, -3.0, -3.0),
        ("importance_sampling", 0.5, -2.0, 1.0, 1.0),
        ("ppo", 1.5, 2.0, -2.4, 0.0),
        ("ppo", 1.1, 2.0, -2.2, -2.2),
        ("ppo", 0.5, -2.0, 1.6, 0.0),
        ("ppo", 1.5, -2.0, 3.0, 3.0),
        ("cispo", 1.5, 2.0, None, -2.4),
        ("cispo", 0.5, 2.0, None, -1.6),
        ("dro", 1.5, 2.0, None, -2.0 + 0.05 * math.log(1.5)),
    ],
)
def test_a_token_alone(
    name: str, ratio: float, advantage: float, loss: float | None, slope: float
) -> None:
    sampled = -2.0
    values, gradient = loss_of(
        name, [sampled + math.log(ratio)], logprobs=[sampled], advantages=[advantage]
    )
    assert float(gradient) == pytest.approx(slope)
    if loss is not None:
        assert float(values) == pytest.approx(loss)


def test_a_weight_may_have_any_sign() -> None:
    values, gradient = loss_of("cross_entropy", [-1.0, -2.0], weights=[0.5, -3.0])
    assert values.tolist() == [0.5, -6.0]
    assert gradient.tolist() == [-0.5, 3.0]


def test_a_sequence_has_one_ratio_of_the_tokens_that_its_mask_counts() -> None:
    sampled = [-1.0, -1.0, -1.0]
    logprobs = [-1.0 + math.log(1.21), -1.0, 5.0]
    values, gradient = loss_of(
        "gspo",
        logprobs,
        logprobs=sampled,
        advantages=[1.0, 1.0, 0.0],
        sequence_ratio_mask=[1.0, 1.0, 0.0],
    )
    assert values.tolist() == pytest.approx([-1.1, -1.1, 0.0])
    assert gradient.tolist() == pytest.approx([-1.1, -1.1, 0.0])
    none, _ = loss_of(
        "gspo", logprobs, logprobs=sampled, advantages=[2.0] * 3, sequence_ratio_mask=[0.0] * 3
    )
    assert none.tolist() == [-2.0] * 3


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_token_without_an_advantage_or_masked_costs_nothing_whatever_was_sampled(
    name: str,
) -> None:
    values, gradient = loss_of(
        name,
        [-1.0, -1.0],
        logprobs=[-1e9, -1e9],
        advantages=[0.0, 3.0],
        mask=[1.0, 0.0],
    )
    assert values.tolist() == [0.0, 0.0]
    assert gradient.tolist() == [0.0, 0.0]
