"""Divergences from a teacher against plain torch, and their gradients against differences."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from flotilla_learner.algo.distillation import reverse_kl_advantages, token_divergence
from flotilla_learner.config.algorithm import DistillationConfig

TOKENS, VOCABULARY, K = 5, 12, 4
CHOICES: list[dict[str, Any]] = [
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl"},
    {"divergence": "jsd", "beta": 0.5},
    {"divergence": "jsd", "beta": 0.1},
    {"divergence": "jsd", "beta": 0.9},
]


def draw_logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)


def chosen(**values: Any) -> DistillationConfig:
    return DistillationConfig(top_k=K, **values)


def plain_divergence(own: Tensor, its: Tensor, config: DistillationConfig) -> Tensor:
    """As TRL writes it, by torch's own kl_div on log-probabilities of all outcomes."""

    def kl(other: Tensor, one: Tensor) -> Tensor:
        return kl_div(other, one, reduction="none", log_target=True).sum(-1)

    if config.divergence == "forward_kl":
        return kl(own, its)
    if config.divergence == "reverse_kl":
        return kl(its, own)
    mixture = (config.beta * its.exp() + (1 - config.beta) * own.exp()).log()
    return config.beta * kl(mixture, its) + (1 - config.beta) * kl(mixture, own)


def merge_rest(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Logprobs of the tokens `ids`, and of all others together, by adding probabilities up."""
    probabilities = logprobs.exp()
    kept = probabilities.gather(1, ids)
    rest = probabilities.scatter(1, ids, 0.0).sum(1, keepdim=True)
    return torch.cat([kept, rest], 1).log()


@pytest.mark.parametrize("values", CHOICES)
def test_the_divergence_is_that_of_the_likeliest_tokens_and_all_others_as_one(
    values: dict[str, Any],
) -> None:
    own, its = log_softmax(draw_logits(1), -1), log_softmax(draw_logits(2), -1)
    top, ids = its.topk(K)
    found = token_divergence(own.gather(1, ids), top, chosen(**values))
    expected = plain_divergence(merge_rest(own, ids), merge_rest(its, ids), chosen(**values))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    whole = plain_divergence(own, its, chosen(**values))
    assert torch.all(found > 0) and torch.all(found <= whole + 1e-12)


@pytest.mark.parametrize("values", CHOICES)
def test_its_gradient_is_that_of_finite_differences(values: dict[str, Any]) -> None:
    its = log_softmax(draw_logits(2), -1)
    top, ids = its.topk(K)

    def total(logits: Tensor) -> Tensor:
        return token_divergence(log_softmax(logits, -1).gather(1, ids), top, chosen(**values)).sum()

    logits = draw_logits(1).requires_grad_()
    (slope,) = torch.autograd.grad(total(logits), logits)
    step = 1e-6
    for place in np.ndindex(TOKENS, VOCABULARY):
        moved = torch.zeros_like(logits)
        moved[place] = step
        with torch.no_grad():
            difference = (total(logits + moved) - total(logits - moved)) / (2 * step)
        assert float(slope[place]) == pytest.approx(float(difference), abs=1e-7)


@pytest.mark.parametrize("values", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_policy_that_is_the_teacher_has_no_divergence_and_no_gradient(
    values: dict[str, Any], dtype: torch.dtype
) -> None:
    """Also where the likeliest tokens are all that there are, and float32 sums them up to 1."""
    logits = torch.tensor([[30.0, 1.0, 0.5, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0, -90.0]], dtype=dtype)
    top, ids = log_softmax(logits, -1).topk(K)
    leaf = logits.clone().requires_grad_()
    found = token_divergence(log_softmax(leaf, -1).gather(1, ids), top, chosen(**values))
    (slope,) = torch.autograd.grad(found.sum(), leaf)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-6)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-6)


@pytest.mark.parametrize("values", CHOICES)
def test_certainty_on_either_side_gives_finite_numbers(values: dict[str, Any]) -> None:
    sure = log_softmax(torch.tensor([[90.0, 0.0, 0.0, 0.0, 0.0]]), -1)
    open_ = log_softmax(torch.tensor([[0.0, 1.0, 2.0, 3.0, 0.0]]), -1)
    for own, its in ((sure, open_), (open_, sure)):
        top, ids = its.topk(K)
        leaf = own.gather(1, ids).requires_grad_()
        found = token_divergence(leaf, top, chosen(**values))
        (slope,) = torch.autograd.grad(found.sum(), leaf)
        assert torch.isfinite(found).all() and torch.isfinite(slope).all()


@pytest.mark.parametrize(("beta", "limit"), [(1e-5, "forward_kl"), (1 - 1e-5, "reverse_kl")])
def test_jsd_at_its_ends_is_a_kl_times_its_small_weight(beta: float, limit: str) -> None:
    own, its = log_softmax(draw_logits(1), -1)[:, :K], log_softmax(draw_logits(2), -1)[:, :K]
    near = token_divergence(own, its, chosen(divergence="jsd", beta=beta)) / min(beta, 1 - beta)
    torch.testing.assert_close(
        near, token_divergence(own, its, chosen(divergence=limit)), rtol=1e-3, atol=0
    )


def test_a_token_that_the_teacher_finds_likelier_has_a_positive_advantage() -> None:
    teacher, sampler = np.array([-1.0, -3.0], np.float32), np.array([-2.0, -0.5], np.float32)
    assert reverse_kl_advantages(teacher, sampler, 0.5).tolist() == [0.5, -1.25]


def test_the_advantages_estimate_the_reverse_kl() -> None:
    """Their mean over samples is -KL(policy || teacher), within four standard errors."""
    own, its = (log_softmax(draw_logits(seed), -1)[0] for seed in (1, 2))
    count = 20_000
    ids = torch.multinomial(
        own.exp(), count, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    found = reverse_kl_advantages(its[ids].numpy(), own[ids].numpy(), 1.0)
    exact = float((own.exp() * (own - its)).sum())
    assert abs(-found.mean() - exact) < 4 * found.std() / count**0.5
