import math

import pytest
import torch

from flotilla_learner.algo.kl import kl_penalty, kl_rewards
from flotilla_learner.algo.objective import Objective, ObjectiveSums
from flotilla_learner.config.algorithm import KlConfig
from tests.learner.algo.support import config, sample

ESTIMATORS = ["k1", "k2", "k3", "abs"]


def closed_form(estimator: str, d: float) -> tuple[float, float]:
    """Value and derivative at log-ratio d = log policy - log reference."""
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
        "abs": (abs(d), math.copysign(1.0, d)),
    }[estimator]


@pytest.mark.parametrize("d", [-1.5, -0.1, 0.2, 2.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient_are_those_of_the_closed_form(estimator: str, d: float) -> None:
    reference = torch.tensor([-3.0], dtype=torch.float64)
    logprobs = (reference + d).requires_grad_()
    value = kl_penalty(logprobs, reference, estimator)
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert (float(value.detach()), float(slope)) == pytest.approx(
        closed_form(estimator, d), abs=1e-12
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_passes_the_numerical_gradient_check(estimator: str) -> None:
    drawn = sample([20])
    leaf = drawn.logprobs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, drawn.reference, estimator), leaf)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_in_the_loss_it_moves_the_policy_where_nothing_else_does(estimator: str) -> None:
    """Without advantages all of the gradient is the KL's; a term computed without one fails."""
    drawn = sample([4, 3])
    objective = Objective(config(kl={"coefficient": 0.5, "estimator": estimator}))
    index, tokens = drawn.pack([0, 1], [0.1, 0.2], proximal=False, reference=True)
    tokens.advantages.zero_()
    leaf = drawn.logprobs[index].clone().requires_grad_()
    loss = objective.make_pack_loss(tokens)(leaf, slice(0, 7))
    (slope,) = torch.autograd.grad(loss.sum(), leaf)
    differences = (drawn.logprobs - drawn.reference)[index].tolist()
    expected = [
        0.5 * weight * closed_form(estimator, d)[1]
        for weight, d in zip(tokens.weights.tolist(), differences, strict=True)
    ]
    assert slope.tolist() == pytest.approx(expected, rel=1e-12)
    assert (slope != 0).all()


def test_to_the_sampler_it_moves_tokens_back_to_what_the_engine_computed() -> None:
    drawn = sample([4, 3])
    objective = Objective(config(kl={"coefficient": 0.5, "estimator": "k2", "to": "sampler"}))
    index, tokens = drawn.pack([0, 1], [0.1, 0.2], proximal=False, reference=False)
    tokens.advantages.zero_()
    leaf = drawn.logprobs[index].clone().requires_grad_()
    pack = objective.make_pack_loss(tokens)
    (slope,) = torch.autograd.grad(pack(leaf, slice(0, 7)).sum(), leaf)
    differences = (drawn.logprobs - drawn.behaviour)[index]
    torch.testing.assert_close(slope, 0.5 * tokens.weights * differences)
    assert (slope != 0).all()
    measured = ObjectiveSums.from_figures(pack.measure().tolist()).kl
    assert measured == pytest.approx(float((differences.square() / 2).sum()))


def test_a_kl_to_the_sampler_is_no_part_of_the_reward() -> None:
    with pytest.raises(ValueError, match='"sampler" needs place = "loss"'):
        KlConfig(coefficient=0.1, to="sampler", place="reward")


def test_k1_and_k3_estimate_the_kl_without_bias_and_k3_is_never_negative() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    for estimator in ("k1", "k3"):
        values = kl_penalty(policy.log(), reference.log(), estimator)
        assert float((policy * values).sum()) == pytest.approx(exact, rel=1e-12)
    assert (kl_penalty(policy.log(), reference.log(), "k3") >= 0).all()


def test_in_expectation_the_gradient_of_k2_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.4, -0.3, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled = (logprobs.detach().exp() * kl_penalty(logprobs, reference, "k2")).sum()
    (ours,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_in_the_reward_it_is_taken_off_and_has_no_gradient() -> None:
    drawn = sample([5])
    leaf = drawn.logprobs.clone().requires_grad_()
    rewards = kl_rewards(leaf, drawn.reference, KlConfig(coefficient=0.1, estimator="k1"))
    assert not rewards.requires_grad
    torch.testing.assert_close(rewards, -0.1 * (drawn.logprobs - drawn.reference))


def test_in_the_reward_it_adds_nothing_to_the_loss_and_is_measured() -> None:
    drawn = sample([5])
    plain, shaped = config(), config(kl={"coefficient": 0.5, "place": "reward"})
    losses: list[torch.Tensor] = []
    for chosen in (plain, shaped):
        _, tokens = drawn.pack([0], [0.2], proximal=False, reference=chosen is shaped)
        pack = Objective(chosen).make_pack_loss(tokens)
        losses.append(pack(drawn.logprobs.clone().requires_grad_(), slice(0, 5)).detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    expected = kl_penalty(drawn.logprobs, drawn.reference, "k3").sum()
    assert ObjectiveSums.from_figures(pack.measure().tolist()).kl == pytest.approx(float(expected))


def test_k3_of_an_absurd_ratio_is_finite_and_an_unknown_estimator_is_refused() -> None:
    far = kl_penalty(torch.tensor([-1e4]), torch.tensor([0.0]), "k3")
    assert torch.isfinite(far).all()
    with pytest.raises(ValueError, match="known are k1, k2, k3, abs"):
        kl_penalty(far, far, "k4")
