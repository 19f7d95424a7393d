"""Loss, corrections, masks, KL and entropy together, as the ranks use them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla_learner.algo.losses import LOSSES
from flotilla_learner.algo.objective import Objective, ObjectiveSums, PackLoss
from flotilla_learner.types import StepSettings
from tests.learner.algo.support import Sample, config, sample

LENGTHS = (4, 1, 6)
WEIGHTS = (0.05, 0.1, 0.2)
MASKS: dict[str, Any] = {"token_mask": [0.8, 1.25]}
SEQUENCE_MASKS: dict[str, Any] = {"sequence_mask_geometric": [0.9, 1.1]}


def sums_of(pack: PackLoss) -> ObjectiveSums:
    return ObjectiveSums.from_figures(pack.measure().tolist())


def evaluate(
    drawn: Sample,
    keys: dict[str, Any],
    *,
    settings: StepSettings | None = None,
    proximal: bool = False,
) -> tuple[Tensor, Tensor, PackLoss]:
    """Weighted loss of each token, its sum's gradient by each logprob, and the pack."""
    objective = Objective(config(**keys), settings)
    _, tokens = drawn.pack(
        range(len(drawn.lengths)),
        WEIGHTS,
        proximal=proximal,
        reference=objective.needs_reference_logprobs,
    )
    pack = objective.make_pack_loss(tokens)
    leaf = drawn.logprobs.clone().requires_grad_()
    loss = pack(leaf, slice(0, len(leaf)))
    (slope,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), slope, pack


def weights(drawn: Sample) -> Tensor:
    return torch.tensor(WEIGHTS, dtype=torch.float64)[drawn.sequence]


def test_decoupled_ppo_is_the_clipped_loss_weighed_by_proximal_over_behaviour() -> None:
    """Decoupled PPO, arXiv 2110.00641 and 2505.24298, its weight truncated at 2."""
    drawn = sample(LENGTHS)
    keys = {"proximal": "trainer", "mini_batches": 2, "correction": {"token_tis": 2.0}}
    loss, slope, _ = evaluate(drawn, keys, proximal=True)
    leaf = drawn.logprobs.clone().requires_grad_()
    ratio = (leaf - drawn.proximal).exp()
    bounded = ratio.clamp(0.8, 1.28)
    clipped = torch.minimum(ratio * drawn.advantages, bounded * drawn.advantages)
    importance = (drawn.proximal - drawn.behaviour).exp().clamp(max=2.0)
    expected = -importance * clipped * weights(drawn)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(slope, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES.names)
def test_against_the_trainer_itself_a_single_update_is_reinforce_with_truncated_weights(
    loss: str,
) -> None:
    drawn = sample(LENGTHS)
    keys = {"proximal": "trainer", "loss": loss, "correction": {"token_tis": 2.0}}
    _, slope, _ = evaluate(drawn, keys)
    importance = (drawn.logprobs - drawn.behaviour).exp().clamp(max=2.0)
    expected = -importance * drawn.advantages * weights(drawn)
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES.names)
@pytest.mark.parametrize("correction", [MASKS, SEQUENCE_MASKS], ids=["token", "sequence"])
def test_a_masked_token_has_exactly_no_gradient_and_the_others_keep_theirs(
    loss: str, correction: dict[str, Any]
) -> None:
    drawn = sample(LENGTHS, noise=0.1)
    drawn.behaviour[drawn.sequence == 0] -= 0.5
    keys = {"loss": loss, "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.1}
    free_loss, free_slope, _ = evaluate(drawn, keys)
    loss_of, slope, pack = evaluate(drawn, {**keys, "correction": correction})
    assert 0 < sums_of(pack).masked < sum(LENGTHS)
    masked = ~pack.kept
    for values in (loss_of, slope, pack.entropy_weights(slice(None))):
        assert (values[masked] == 0).all()
    torch.testing.assert_close(loss_of[pack.kept], free_loss[pack.kept], rtol=0, atol=0)
    torch.testing.assert_close(slope[pack.kept], free_slope[pack.kept], rtol=0, atol=0)


@pytest.mark.parametrize("loss", LOSSES.names)
@pytest.mark.parametrize("absurd", [-math.inf, -1e30])
def test_a_masked_token_has_none_even_where_its_logprob_is_absurd(loss: str, absurd: float) -> None:
    drawn = sample((3,), noise=0.1)
    drawn.logprobs[1] = absurd
    keys = {"loss": loss, "kl": {"coefficient": 0.1}, "correction": {"token_mask": [0.5, 2.0]}}
    found, slope, pack = evaluate(drawn, keys)
    assert pack.kept.tolist() == [True, False, True]
    assert (float(found[1]), float(slope[1])) == (0.0, 0.0)
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("loss", LOSSES.names)
def test_a_logprob_that_is_nan_shows_in_the_loss_whatever_the_masks_say(loss: str) -> None:
    drawn = sample((3,), noise=0.1)
    drawn.logprobs[1] = math.nan
    keys = {"loss": loss, "correction": {"token_mask": [0.5, 2.0]}}
    found, _, _ = evaluate(drawn, keys, settings=StepSettings(ratio_limit=2.0))
    assert found.sum().isnan()


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "sapo", "importance_sampling"])
@pytest.mark.parametrize("side", ["logprobs", "behaviour"])
def test_a_probability_of_zero_on_either_side_stays_finite_without_a_mask(
    loss: str, side: str
) -> None:
    drawn = sample((3,), noise=0.1)
    getattr(drawn, side)[1] = -math.inf
    found, slope, _ = evaluate(drawn, {"loss": loss})
    assert torch.isfinite(found).all()
    assert torch.isfinite(slope).all()


def test_the_guards_limit_masks_tokens_on_top_of_the_configuration() -> None:
    drawn = sample(LENGTHS)
    _, slope, pack = evaluate(drawn, {}, settings=StepSettings(ratio_limit=1.2))
    inside = (drawn.logprobs - drawn.behaviour).abs() <= math.log(1.2)
    assert pack.kept.tolist() == inside.tolist()
    assert (slope[~inside] == 0).all()


def test_staleness_weighs_the_policy_loss_and_not_the_kl() -> None:
    drawn = sample(LENGTHS)
    decayed, _, _ = evaluate(drawn, {"correction": {"staleness_decay": 0.5}})
    plain, _, _ = evaluate(drawn, {})
    # `pack` makes sequence k lag k versions.
    lag = drawn.sequence.double()
    torch.testing.assert_close(decayed, plain * 0.5**lag, rtol=0, atol=1e-15)
    kl = {"kl": {"coefficient": 0.3}}
    with_kl, _, _ = evaluate(drawn, kl)
    both, _, _ = evaluate(drawn, {**kl, "correction": {"staleness_decay": 0.5}})
    torch.testing.assert_close(both - decayed, with_kl - plain, rtol=0, atol=1e-12)


def test_the_trainer_of_corrections_is_the_one_as_the_step_began() -> None:
    """Later updates keep the mask, however far the policy has moved."""
    drawn = sample(LENGTHS)
    keys = {"mini_batches": 2, "correction": MASKS}
    _, _, pack = evaluate(drawn, keys, proximal=True)
    ratio = (drawn.proximal - drawn.behaviour).exp()
    assert pack.kept.tolist() == ((ratio >= 0.8) & (ratio <= 1.25)).tolist()


@pytest.mark.parametrize(
    ("keys", "coupled", "proximal", "reference", "moves"),
    [
        ({}, False, False, False, False),
        ({"mini_batches": 2}, False, False, False, False),
        ({"loss": "gspo", "epochs": 2}, True, False, False, False),
        ({"proximal": "trainer"}, False, False, False, False),
        ({"proximal": "trainer", "epochs": 2}, False, True, False, False),
        ({"correction": MASKS}, False, False, False, False),
        ({"correction": MASKS, "mini_batches": 2}, False, True, False, False),
        ({"correction": SEQUENCE_MASKS}, True, False, False, False),
        ({"correction": SEQUENCE_MASKS, "epochs": 2}, False, True, False, False),
        ({"correction": {"staleness_decay": 0.9}, "epochs": 2}, False, False, False, False),
        ({"kl": {"coefficient": 0.1}}, False, False, True, True),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, False, True, True, False),
        ({"kl": {"coefficient": 0.1, "to": "sampler"}}, False, False, False, True),
        ({"entropy_coefficient": -0.1}, False, False, False, True),
    ],
)
def test_what_it_needs_is_known_before_the_step(
    keys: dict[str, Any], coupled: bool, proximal: bool, reference: bool, moves: bool
) -> None:
    objective = Objective(config(**keys))
    found = (
        objective.coupled,
        objective.needs_proximal_logprobs,
        objective.needs_reference_logprobs,
        objective.moves_without_advantage,
    )
    assert found == (coupled, proximal, reference, moves)


def test_a_limit_of_the_guard_needs_the_trainers_logprobs_too() -> None:
    several = config(mini_batches=2)
    assert Objective(several, StepSettings(ratio_limit=2.0)).needs_proximal_logprobs
    assert not Objective(several, StepSettings()).needs_proximal_logprobs


def test_a_kl_penalty_without_a_reference_is_refused() -> None:
    drawn = sample(LENGTHS)
    _, tokens = drawn.pack([0], [1.0], proximal=False, reference=False)
    with pytest.raises(ValueError, match="needs the reference policy's logprobs"):
        Objective(config(kl={"coefficient": 0.1})).make_pack_loss(tokens)


def test_sums_count_tokens_and_sequences_and_add_up() -> None:
    drawn = sample((2, 3), noise=0.0)
    drawn.behaviour[:2] -= 2.0
    drawn.behaviour[2] -= 0.5
    keys = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl": {"coefficient": 0.1, "estimator": "k1"},
        "correction": {"token_mask": [0.5, 2.0]},
    }
    drawn.sequence_advantages[:] = 1.0
    drawn.reference[:] = drawn.logprobs - 0.25
    _, _, pack = evaluate(drawn, keys)
    assert sums_of(pack) == ObjectiveSums(
        tokens=5,
        clipped=1,
        masked=2,
        masked_sequences=1,
        sequences=2,
        weight=5.0,
        kl=sums_of(pack).kl,
    )
    assert sums_of(pack).kl == pytest.approx(5 * 0.25)
    assert (sums_of(pack) + sums_of(pack)).masked == 4
    assert ObjectiveSums() + sums_of(pack) == sums_of(pack)
