import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flotilla_learner.algo.losses import LOSSES, LossInput, TokenLoss
from flotilla_learner.config.algorithm import AlgorithmConfig
from tests.learner.algo.support import config, sample

CONFIG = config(clip_low=0.2, clip_high=0.28, dual_clip=3.0, sapo_positive=1.0, sapo_negative=1.5)
ADVANTAGES = [1.5, -1.5]
RATIOS = [0.3, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1]


def one_token(name: str, ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss, d loss / d logprob and whether it was clipped, of a token sampled at logprob -2."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    only = torch.zeros(1, dtype=torch.int64)
    tokens = LossInput(logprobs, old, torch.tensor([advantage]).double(), only, 1)
    result = LOSSES.get(name)(tokens, CONFIG)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return float(result.loss.detach()), float(gradient), bool(result.clipped)


def clip(ratio: float) -> float:
    return min(max(ratio, 0.8), 1.28)


def ppo(ratio: float, advantage: float) -> tuple[float, float, bool]:
    loss = -min(ratio * advantage, clip(ratio) * advantage)
    clipped = clip(ratio) * advantage < ratio * advantage
    return loss, 0.0 if clipped else -ratio * advantage, clipped


def dual(ratio: float, advantage: float) -> tuple[float, float, bool]:
    loss, slope, clipped = ppo(ratio, advantage)
    if advantage < 0 and loss > -3.0 * advantage:
        return -3.0 * advantage, 0.0, True
    return loss, slope, clipped


def cispo(ratio: float, advantage: float) -> tuple[float, float, bool]:
    slope = -clip(ratio) * advantage
    return slope * (-2 + math.log(ratio)), slope, clip(ratio) != ratio


def sapo(ratio: float, advantage: float) -> tuple[float, float, bool]:
    tau = 1.0 if advantage > 0 else 1.5
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage, False


def dppo(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """DPPO of a token at logprob -2: ratios up to 3.07 move its probability by at most 0.28, and
    none lowers it by 0.2."""
    outside = advantage > 0 and math.exp(-2) * (ratio - 1) > 0.28
    slope = 0.0 if outside else -ratio * advantage
    return slope, slope, outside


def divergence(old: float, new: float) -> float:
    """KL of "this token or another" from one probability to another."""
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


def dppo_kl(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """DPPO-KL of a token at logprob -2: its clips of 0.2 and 0.28 need a ratio above 5."""
    assert divergence(math.exp(-2), ratio * math.exp(-2)) < 0.2
    return -ratio * advantage, -ratio * advantage, False


CLOSED_FORMS: dict[str, Callable[[float, float], tuple[float, float, bool]]] = {
    "ppo_clip": ppo,
    "dual_clip": dual,
    # With no token held.
    "clip_cov": ppo,
    # Of a sequence of one token.
    "gspo": ppo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "dppo_kl": dppo_kl,
    "importance_sampling": lambda ratio, a: (-ratio * a, -ratio * a, False),
}


def test_every_loss_has_a_closed_form_here() -> None:
    assert set(LOSSES.names) == set(CLOSED_FORMS)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_loss_gradient_and_clip_are_those_of_the_closed_form(
    name: str, advantage: float, ratio: float
) -> None:
    loss, slope, clipped = one_token(name, ratio, advantage)
    expected = CLOSED_FORMS[name](ratio, advantage)
    assert (loss, slope) == pytest.approx(expected[:2], rel=1e-12)
    if ratio != 1.0:
        assert clipped is expected[2]


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_on_policy_every_gradient_is_that_of_reinforce(name: str, advantage: float) -> None:
    assert one_token(name, 1.0, advantage)[1] == pytest.approx(-advantage, rel=1e-12)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_a_token_without_an_advantage_moves_nothing(name: str) -> None:
    loss, slope, _ = one_token(name, 1.7, 0.0)
    assert (loss, slope) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "sapo", "importance_sampling"])
def test_passes_the_numerical_gradient_check(name: str) -> None:
    drawn = sample([7, 1, 12, 20])

    def loss(logprobs: Tensor) -> Tensor:
        return LOSSES.get(name)(drawn.loss_input(logprobs, drawn.behaviour), CONFIG).loss

    assert torch.autograd.gradcheck(loss, drawn.logprobs.clone().requires_grad_())


def test_the_token_form_of_gspo_has_the_gradient_of_gspo_itself() -> None:
    """Finite differences of the sequence form against autograd of the token form."""
    drawn = sample([7, 1, 12, 20], noise=0.2)

    def token_form(logprobs: Tensor) -> Tensor:
        tokens = drawn.loss_input(logprobs, drawn.behaviour)
        return LOSSES.get("gspo")(tokens, CONFIG).loss.sum()

    def sequence_form(logprobs: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for place, length in enumerate(drawn.lengths):
            own = drawn.sequence == place
            ratio = (logprobs - drawn.behaviour)[own].mean().exp()
            advantage = drawn.sequence_advantages[place]
            held = ratio.clamp(1 - CONFIG.clip_low, 1 + CONFIG.clip_high)
            total = total - length * torch.minimum(ratio * advantage, held * advantage)
        return total

    leaf = drawn.logprobs.clone().requires_grad_()
    torch.testing.assert_close(token_form(leaf), sequence_form(leaf), rtol=0, atol=1e-12)
    (ours,) = torch.autograd.grad(token_form(leaf), leaf)
    (theirs,) = torch.autograd.grad(sequence_form(leaf), leaf)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(sequence_form, leaf)


def test_gspo_clips_whole_sequences_by_their_mean_and_no_single_token() -> None:
    old = torch.zeros(4, dtype=torch.float64)
    # The first sequence's mean log-ratio is 0 although each token's is far off.
    logprobs = torch.tensor([1.0, -1.0, 0.4, 0.2], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1])
    result = LOSSES.get("gspo")(LossInput(logprobs, old, torch.ones(4), sequence, 2), CONFIG)
    assert result.clipped.tolist() == [False, False, True, True]
    assert result.loss[:2].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("old", "new", "advantage", "clipped"),
    [
        # A hundred times as likely, and still rare.
        (0.001, 0.1, 1.0, False),
        (0.5, 0.79, 1.0, True),
        (0.5, 0.79, -1.0, False),
        (0.5, 0.29, -1.0, True),
        (0.5, 0.29, 1.0, False),
        (0.5, 0.31, -1.0, False),
    ],
)
def test_dppo_holds_tokens_by_how_far_their_probability_has_moved_with_the_advantage(
    old: float, new: float, advantage: float, clipped: bool
) -> None:
    logprobs = torch.tensor([math.log(new)], requires_grad=True)
    result = several("dppo", logprobs, torch.tensor([math.log(old)]), torch.tensor([advantage]))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert bool(result.clipped) is clipped
    expected = 0.0 if clipped else -advantage * new / old
    assert float(gradient) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "clipped"),
    [
        # A hundred times as likely, and still rare.
        (0.001, 0.1, 1.0, False),
        (0.001, 0.3, 1.0, True),
        (0.5, 0.81, 1.0, False),
        (0.5, 0.83, 1.0, True),
        (0.5, 0.83, -1.0, False),
        (0.5, 0.20, -1.0, True),
        (0.5, 0.20, 1.0, False),
        (0.5, 0.23, -1.0, False),
        # Down by 0.2 from near 1, which is further than by 0.27 from a half.
        (0.999, 0.8, -1.0, True),
    ],
)
def test_dppo_kl_holds_tokens_by_their_binary_divergence_in_the_advantages_direction(
    old: float, new: float, advantage: float, clipped: bool
) -> None:
    limit = CONFIG.clip_high if advantage > 0 else CONFIG.clip_low
    towards = (new > old) == (advantage > 0)
    assert clipped is (towards and divergence(old, new) > limit)
    logprobs = torch.tensor([math.log(new)], requires_grad=True)
    result = several("dppo_kl", logprobs, torch.tensor([math.log(old)]), torch.tensor([advantage]))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert bool(result.clipped) is clipped
    expected = 0.0 if clipped else -advantage * new / old
    assert float(gradient) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "clipped"),
    [
        # From and to certainty, which float32 reaches; a logprob above 0 is a certain token's.
        (0.0, 0.0, 1.0, False),
        (0.0, 0.0, -1.0, False),
        (1e-7, 0.0, -1.0, False),
        (-0.5, 0.0, 1.0, True),
        (0.0, -0.5, -1.0, True),
        (-math.inf, -0.5, 1.0, True),
        (-math.inf, -20.0, 1.0, False),
        (-0.5, -math.inf, -1.0, True),
    ],
)
def test_dppo_kl_is_right_at_probabilities_of_0_and_1(
    old: float, new: float, advantage: float, clipped: bool
) -> None:
    given = (torch.tensor([value]) for value in (new, old, advantage))
    result = several("dppo_kl", *given)
    assert bool(result.clipped) is clipped
    assert torch.isfinite(result.loss).all()


def test_clip_cov_moves_no_token_that_is_held() -> None:
    drawn = sample([7, 5])
    held = torch.arange(12) % 3 == 0
    leaf = drawn.logprobs.clone().requires_grad_()
    tokens = replace(drawn.loss_input(leaf, drawn.behaviour), held=held)
    result = LOSSES.get("clip_cov")(tokens, CONFIG)
    plain = LOSSES.get("ppo_clip")(tokens, CONFIG)
    assert torch.equal(result.loss, torch.where(held, 0.0, plain.loss))
    assert torch.equal(result.clipped, plain.clipped | held)
    (gradient,) = torch.autograd.grad(result.loss.sum(), leaf)
    assert not gradient[held].any() and gradient[~held].any()


def test_a_logprob_that_is_nan_shows_where_it_is_held_too() -> None:
    nan, held = torch.tensor([float("nan")]), torch.tensor([True])
    tokens = LossInput(nan, torch.zeros(1), torch.ones(1), torch.tensor([0]), 1, held)
    assert LOSSES.get("clip_cov")(tokens, CONFIG).loss.isnan().all()


def test_only_gspo_couples_the_tokens_of_a_sequence() -> None:
    assert [name for name in LOSSES.names if LOSSES.is_coupled(name)] == ["gspo"]


def several(name: str, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    sequence = torch.zeros(len(logprobs), dtype=torch.int64)
    return LOSSES.get(name)(LossInput(logprobs, old, advantages, sequence, 1), CONFIG)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_an_absurd_ratio_stays_finite(name: str) -> None:
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    result = several(name, logprobs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("broken", ["logprobs", "old"])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_a_logprob_that_is_nan_shows_in_the_loss(name: str, broken: str) -> None:
    whole, nan = torch.tensor([-1.0]), torch.tensor([float("nan")])
    pair = (nan, whole) if broken == "logprobs" else (whole, nan)
    assert several(name, *pair, torch.tensor([0.5])).loss.isnan().all()


def test_an_equal_clip_on_both_sides_is_the_symmetric_ppo() -> None:
    same = AlgorithmConfig(clip_low=0.2, clip_high=0.2)
    drawn = sample([30])
    tokens = drawn.loss_input(drawn.logprobs, drawn.behaviour)
    ratio = (drawn.logprobs - drawn.behaviour).exp()
    expected = -torch.minimum(ratio * drawn.advantages, ratio.clamp(0.8, 1.2) * drawn.advantages)
    torch.testing.assert_close(LOSSES.get("ppo_clip")(tokens, same).loss, expected)
