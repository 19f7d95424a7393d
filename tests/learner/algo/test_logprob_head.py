from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.learner.algo.logprob_head import fused_policy_loss, token_logprobs
from services.learner.algo.losses import LossInput, ppo_clip
from services.learner.algorithm_config import AlgorithmConfig

TOKENS, WIDTH, VOCAB = 37, 11, 53


@dataclass
class Problem:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperature: Tensor
    behaviour: Tensor
    advantages: Tensor

    def objective(self, logprobs: Tensor, span: slice) -> Tensor:
        one = torch.zeros_like(self.targets[span])
        tokens = LossInput(logprobs, self.behaviour[span], self.advantages[span], one, 1)
        return ppo_clip(tokens, AlgorithmConfig()).loss / TOKENS


def problem(dtype: torch.dtype) -> Problem:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(TOKENS, WIDTH), normal(VOCAB, WIDTH)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    temperature = torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64)
    exact = naive_logprobs(hidden, weight, targets, temperature)
    made = Problem(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        targets,
        temperature.to(dtype),
        (exact + 0.2 * normal(TOKENS)).to(dtype),
        normal(TOKENS).to(dtype),
    )
    return made


def naive_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    logits = hidden @ weight.t() / temperature[:, None]
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_equals_the_naive_head_in_float64_with_its_gradients(chunk: int) -> None:
    case = problem(torch.float64)
    expected = naive_logprobs(case.hidden, case.weight, case.targets, case.temperature)
    naive_loss = case.objective(expected, slice(None)).sum()
    naive_grads = torch.autograd.grad(naive_loss, [case.hidden, case.weight])
    loss, logprobs, entropy = fused_policy_loss(
        case.hidden, case.weight, case.targets, case.temperature, case.objective, chunk=chunk
    )
    grads = torch.autograd.grad(loss, [case.hidden, case.weight])
    torch.testing.assert_close(loss, naive_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=1e-12)
    for ours, theirs in zip(grads, naive_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    logits = (case.hidden @ case.weight.t() / case.temperature[:, None]).detach()
    exact_entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy, exact_entropy, rtol=0, atol=1e-12)


def test_passes_the_numerical_gradient_check() -> None:
    case = problem(torch.float64)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused_policy_loss(
            hidden, weight, case.targets, case.temperature, case.objective, chunk=16
        )[0]

    assert torch.autograd.gradcheck(loss, (case.hidden, case.weight), fast_mode=True)


def test_scales_with_the_gradient_that_comes_in() -> None:
    case = problem(torch.float64)
    grads: list[Tensor] = []
    for factor in (1.0, -2.5):
        loss = fused_policy_loss(
            case.hidden, case.weight, case.targets, case.temperature, case.objective, chunk=16
        )[0]
        grads.append(torch.autograd.grad(factor * loss, case.weight)[0])
    torch.testing.assert_close(grads[1], -2.5 * grads[0])


def test_bfloat16_input_gives_float32_logprobs_near_the_exact_ones() -> None:
    exact, rough = problem(torch.float64), problem(torch.bfloat16)
    _, logprobs, _ = fused_policy_loss(
        rough.hidden,
        rough.weight.detach().float().requires_grad_(),
        rough.targets,
        rough.temperature.float(),
        lambda values, _: -values,
        chunk=16,
    )
    expected = naive_logprobs(exact.hidden, exact.weight, exact.targets, exact.temperature)
    assert logprobs.dtype == torch.float32
    assert (logprobs.double() - expected).abs().max() < 0.2


def test_scoring_alone_gives_the_same_logprobs_and_none_of_nothing() -> None:
    case = problem(torch.float64)
    expected = naive_logprobs(case.hidden, case.weight, case.targets, case.temperature)
    got = token_logprobs(case.hidden, case.weight, case.targets, case.temperature, chunk=5)
    torch.testing.assert_close(got, expected.detach())
    nothing = torch.zeros(0, dtype=torch.int64)
    assert token_logprobs(case.hidden[:0], case.weight, nothing, got[:0], chunk=5).shape == (0,)
