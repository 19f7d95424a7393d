"""Policy losses, alone and with reductions, corrections and KL, as the ranks compute them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flotilla_learner.algo.held_tokens import UpdateTokens
from flotilla_learner.algo.losses import LOSSES as REGISTERED
from flotilla_learner.algo.objective import Objective, PackTokens
from flotilla_learner.algo.reductions import REDUCTIONS
from flotilla_learner.config.algorithm import AlgorithmConfig
from tests.parity.fixtures import Case
from tests.parity.support import TOLERANCE, Packed, agree, chosen, each, gradient_of
from tests.parity.support import case as named

# The length that every peer was given for sequence_mean_token_sum_norm, unless a case sets its own.
NORM_TOKENS = 16
# verl rounds nothing to float32 as TRL does with SAPO's temperatures and SkyRL with every ratio:
# all that is left is the 1e-8 that it adds to the lengths of sequences.
VERL_TOLERANCE = 3e-8

_SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2}
_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
_TIGHT = {"clip_low": 0.03, "clip_high": 0.07}
_SUM_NORM = "sequence_mean_token_sum_norm"
_TO_SAMPLER = {"to": "sampler", "estimator": "k2"}
_K3 = {"kl": {"coefficient": 0.04, "estimator": "k3"}}

# What each case of the fixtures is called in `[learner.algorithm]`.
LOSSES: Mapping[str, dict[str, Any]] = {
    "ppo_clip": {"loss": "ppo_clip", **_SYMMETRIC},
    "ppo_clip_higher": {"loss": "ppo_clip", **_HIGHER},
    "ppo_clip_parts": {"loss": "ppo_clip", **_HIGHER},
    "ppo_clip_sequence_mean": {"loss": "ppo_clip", "reduction": "sequence_mean", **_HIGHER},
    "ppo_clip_sum_norm": {"loss": "ppo_clip", "reduction": _SUM_NORM, **_HIGHER},
    "ppo_clip_with_k3": {"loss": "ppo_clip", **_HIGHER, **_K3},
    "dual_clip": {"loss": "dual_clip", "dual_clip": 3.0, **_HIGHER},
    # All candidates are held, and none is one.
    "clip_cov": {"loss": "clip_cov", "clip_cov": {"share": 1.0, "low": 0.5}, **_HIGHER},
    "clip_cov_none": {"loss": "clip_cov", "clip_cov": {"share": 1.0, "low": 4.99}, **_HIGHER},
    "gspo": {"loss": "gspo", "reduction": "sequence_mean", **_TIGHT},
    "gspo_by_token": {"loss": "gspo", "reduction": "sequence_mean", **_TIGHT},
    "ppo_clip_by_token": {"loss": "ppo_clip", **_TIGHT},
    "gspo_token_mean": {"loss": "gspo", **_TIGHT},
    "gspo_tokens": {"loss": "gspo", "reduction": "sequence_mean", **_HIGHER},
    "luspo": {"loss": "gspo", "reduction": _SUM_NORM, "norm_tokens": 1, **_TIGHT},
    "cispo": {"loss": "cispo", **_HIGHER},
    "cispo_no_low": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    # REINFORCE with a weight that is capped from above is CISPO without a lower bound.
    "truncated_reinforce": {"loss": "cispo", "clip_low": 1.0, "clip_high": 1.0},
    "sapo": {"loss": "sapo", "reduction": "sequence_mean"},
    "sapo_sharp": {
        "loss": "sapo",
        "reduction": "sequence_mean",
        "sapo_positive": 2.5,
        "sapo_negative": 4.0,
    },
    "importance_sampling": {"loss": "importance_sampling"},
    "dppo_ratio": {"loss": "dppo", "clip_low": 0.05, "clip_high": 0.1},
    "dppo_kl_ratio": {"loss": "dppo_kl", "clip_low": 0.01, "clip_high": 0.03},
    # prime-rl's kl_tau is half the coefficient: its term is the squared log-ratio, k2 half of that.
    "dppo_default": {"loss": "dppo", **_SYMMETRIC, "kl": {"coefficient": 2e-3, **_TO_SAMPLER}},
    "dppo_strong_kl": {
        "loss": "dppo",
        "clip_low": 0.05,
        "clip_high": 0.1,
        "kl": {"coefficient": 1.0, **_TO_SAMPLER},
    },
}
# verl's loss is the ratio, held fixed, times the logprob: another value of the same gradient.
GRADIENTS: Mapping[str, dict[str, Any]] = {
    "dppo": {"loss": "dppo", "clip_low": 0.05, "clip_high": 0.1},
    "dppo_kl": {"loss": "dppo_kl", "clip_low": 0.01, "clip_high": 0.03},
}
# Of which tokens are drawn is another matter in every library.
DRAWN = ("clip_cov_some",)
# Ratios far beyond every clip, where peers hold exp back at different places: the differences
# are in test_differences.
EXTREMES: Mapping[str, dict[str, Any]] = {
    "ppo_clip_extremes": LOSSES["ppo_clip_higher"],
    "dual_clip_extremes": LOSSES["dual_clip"],
}

_DECOUPLED = {"loss": "ppo_clip", "proximal": "trainer", **_HIGHER}
_GEOMETRIC = {"sequence_mask_geometric": (0.8, 1.15)}
CORRECTED: Mapping[str, dict[str, Any]] = {
    "decoupled": _DECOUPLED,
    "decoupled_token_tis": {**_DECOUPLED, "correction": {"token_tis": 2.0}},
    "decoupled_sequence_tis": {**_DECOUPLED, "correction": {"sequence_tis": 3.0}},
    "decoupled_token_tis_masks": {
        **_DECOUPLED,
        "correction": {"token_tis": 2.0, "token_mask": (0.5, 4.0), **_GEOMETRIC},
    },
    "decoupled_token_tis_geometric": {
        **_DECOUPLED,
        "correction": {"token_tis": 2.0, **_GEOMETRIC},
    },
}


def configured(settings: Mapping[str, Any]) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def ours(config: AlgorithmConfig, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss of the whole objective and its gradient by each logprob."""
    given = Packed(inputs)
    corrected = "sampler" in inputs
    weights = REDUCTIONS[config.reduction](given.lengths, config.norm_tokens or NORM_TOKENS)
    lengths = torch.tensor(given.lengths)
    tokens = PackTokens(
        behaviour=given["sampler" if corrected else "old"],
        advantages=given["advantages"],
        weights=torch.from_numpy(weights).repeat_interleave(lengths),
        sequence=given.sequence,
        count=given.count,
        staleness=torch.zeros_like(given.sequence),
        proximal=given["trainer"] if corrected else None,
        reference=given["reference"] if config.kl.needs_reference else None,
        held=held_tokens(config, given),
    )
    logprobs = given["logprobs"].requires_grad_()
    loss = Objective(config).make_pack_loss(tokens)(logprobs, slice(None)).sum()
    return loss.detach(), gradient_of(loss, logprobs)


def held_tokens(config: AlgorithmConfig, given: Packed) -> Tensor | None:
    """What a loss holds back if the step has only just begun, as in the peers' function."""
    choice = REGISTERED.find_choice(config.loss)
    if choice is None:
        return None
    tokens = UpdateTokens(*(given[name].numpy() for name in ("advantages", "logprobs", "old")))
    return torch.from_numpy(choice(tokens, config, np.random.default_rng(0)))


@each(chosen("loss", LOSSES, but=[("trl", "gspo_by_token")]))
def test_a_loss_and_its_gradient_are_the_peers(case: Case) -> None:
    tolerance = VERL_TOLERANCE if case.peer == "verl" else TOLERANCE
    loss, gradient = ours(configured(LOSSES[case.name]), case.inputs)
    agree(loss, case.outputs["value"], tolerance)
    agree(gradient, Packed(case.inputs).of(case.outputs["gradient"]), tolerance)


@each(chosen("loss", GRADIENTS))
def test_a_gradient_is_the_peers(case: Case) -> None:
    _, gradient = ours(configured(GRADIENTS[case.name]), case.inputs)
    expected = Packed(case.inputs).of(case.outputs["gradient"])
    agree(gradient, expected, VERL_TOLERANCE)
    advantages = Packed(case.inputs)["advantages"]
    assert ((expected == 0) & (advantages != 0)).any(), "the bounds hold no token"


def test_clip_cov_draws_as_many_tokens_among_the_same_as_verl() -> None:
    some, every = (named("verl", "loss", name) for name in ("clip_cov_some", "clip_cov"))
    given = Packed(some.inputs)
    free, all_held, drawn = (
        given.of(each.outputs["gradient"]) == 0
        for each in (named("verl", "loss", "ppo_clip_higher"), every, some)
    )
    settings = {**LOSSES["clip_cov"], "clip_cov": {"share": 0.1, "low": 0.5}}
    _, gradient = ours(configured(settings), some.inputs)
    candidates = all_held & ~free
    counts = [int((found & ~free).sum()) for found in (drawn, gradient == 0)]
    assert counts[0] == counts[1] == int(0.1 * len(free)) < int(candidates.sum())
    assert not ((gradient == 0) & ~free & ~candidates).any()


@each(chosen("loss", EXTREMES, but=[("trl", "ppo_clip_extremes")]))
def test_beyond_every_clip_what_peers_hold_alike_is_held_alike(case: Case) -> None:
    loss, gradient = ours(configured(EXTREMES[case.name]), case.inputs)
    agree(loss, case.outputs["value"])
    agree(gradient, Packed(case.inputs).of(case.outputs["gradient"]))


@each(chosen("correction", CORRECTED))
def test_decoupled_ppo_with_weights_and_masks_is_the_peers(case: Case) -> None:
    loss, gradient = ours(configured(CORRECTED[case.name]), case.inputs)
    agree(loss, case.outputs["value"])
    agree(gradient, Packed(case.inputs).of(case.outputs["gradient"]))


def test_a_gradient_of_the_peers_is_0_where_no_policy_wrote() -> None:
    for name, case in chosen("loss", LOSSES).items():
        outside = torch.tensor(case.inputs["mask"]) == 0
        assert not torch.tensor(case.outputs["gradient"])[outside].any(), name
