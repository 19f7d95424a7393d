"""Terms beside the policy loss: KL, reductions, corrections, entropy, values, penalties."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flotilla_learner.algo.corrections import Correction, CorrectionInput, compute_correction
from flotilla_learner.algo.critic import clipped_value_loss
from flotilla_learner.algo.kl import kl_penalty, kl_rewards
from flotilla_learner.algo.logprob_head import fused_policy_loss
from flotilla_learner.algo.overlong import soft_penalties
from flotilla_learner.algo.reductions import REDUCTIONS
from flotilla_learner.config.algorithm import CorrectionConfig, KlConfig, OverlongConfig
from tests.parity.fixtures import Case
from tests.parity.support import Packed, agree, chosen, each, gradient_of
from tests.parity.test_losses import NORM_TOKENS, configured, ours

ESTIMATORS = ("k1", "k2", "k3", "abs")
# All but k3 also at log-ratios of +-25; for that see test_differences.
ESTIMATED: Mapping[str, str] = {
    **{name: name for name in ESTIMATORS},
    **{f"{name}_extremes": name for name in ESTIMATORS if name != "k3"},
}
# Weighted into a loss of nothing else.
KL_LOSSES: Mapping[str, dict[str, Any]] = {
    "k3": {"kl": {"coefficient": 1.0}},
    "k3_sequence_mean": {"kl": {"coefficient": 0.04}, "reduction": "sequence_mean"},
}
REDUCED: Mapping[str, str] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}
CORRECTIONS: Mapping[str, dict[str, Any]] = {
    "token_tis": {"token_tis": 2.0},
    "sequence_tis": {"sequence_tis": 3.0},
    "icepop": {"token_tis": 2.0, "token_mask": (0.5, 2.0)},
    "token_mask": {"token_mask": (0.5, 4.0)},
    "sequence_mask_product": {"sequence_mask_product": (0.2, 3.0)},
    "sequence_mask_geometric": {"sequence_mask_geometric": (0.8, 1.15)},
}


def correction(case: Case) -> Correction:
    given = Packed(case.inputs)
    tokens = CorrectionInput(
        given["trainer"],
        given["sampler"],
        given.sequence,
        given.count,
        torch.zeros_like(given.sequence),
    )
    return compute_correction(tokens, CorrectionConfig.model_validate(CORRECTIONS[case.name]))


def penalties(case: Case) -> NDArray[np.float64]:
    lengths = case.inputs["tokens"]
    config = OverlongConfig(
        soft_limit=case.settings["limit"],
        soft_buffer=case.settings["buffer"],
        soft_weight=case.settings["weight"],
    )
    return soft_penalties(["group"] * len(lengths), range(len(lengths)), lengths, config)


@each(chosen("kl", ESTIMATED, but=[("trl", "k3"), ("verl", "k3"), ("skyrl", "k3")]))
def test_an_estimate_of_kl_and_its_gradient_are_the_peers(case: Case) -> None:
    given = Packed(case.inputs)
    logprobs = given["logprobs"].requires_grad_()
    estimate = kl_penalty(logprobs, given["reference"], ESTIMATED[case.name])
    agree(estimate.detach(), given.of(case.outputs["value"]))
    agree(gradient_of(estimate, logprobs), given.of(case.outputs["gradient"]))


@each(chosen("kl", KL_LOSSES, but=[("verl", "k3"), ("skyrl", "k3")]))
def test_a_kl_term_of_the_loss_and_its_gradient_are_the_peers(case: Case) -> None:
    inputs = {**case.inputs, "advantages": torch.zeros(len(case.inputs["mask"]), 10).tolist()}
    loss, gradient = ours(configured(KL_LOSSES[case.name]), inputs)
    assert gradient.abs().max() > 1e-3
    agree(loss, case.outputs["value"])
    agree(gradient, Packed(case.inputs).of(case.outputs["gradient"]))


@each(chosen("kl", [f"reward_{name}" for name in ESTIMATORS]))
def test_a_kl_in_the_reward_is_the_peers(case: Case) -> None:
    given = Packed(case.inputs)
    config = KlConfig.model_validate(
        {
            "coefficient": case.settings["coefficient"],
            "estimator": case.name.removeprefix("reward_"),
            "place": "reward",
        }
    )
    agree(kl_rewards(given["old"], given["reference"], config), given.of(case.outputs["rewards"]))


@each(chosen("reduction", [*REDUCED, *(f"{name}:parts" for name in REDUCED)]))
def test_a_reduction_is_the_peers_in_one_batch_and_in_micro_batches(case: Case) -> None:
    given = Packed(case.inputs)
    reduce = REDUCTIONS[REDUCED[case.name.removesuffix(":parts")]]
    per_sequence = torch.from_numpy(reduce(given.lengths, NORM_TOKENS))
    weights = per_sequence.repeat_interleave(torch.tensor(given.lengths))
    agree((weights * given["logprobs"]).sum(), case.outputs["value"])
    agree(weights, given.of(case.outputs["gradient"]))


@each(chosen("correction", CORRECTIONS))
def test_weights_and_masks_against_the_sampler_are_the_peers(case: Case) -> None:
    given = Packed(case.inputs)
    found = correction(case)
    if "kept" in case.outputs:
        agree(found.kept, given.of(case.outputs["kept"]))
    if "weights" in case.outputs:
        agree(found.weights * found.kept, given.of(case.outputs["weights"]))


@each(chosen("entropy", ["mean"]))
def test_the_entropy_of_the_head_and_its_gradient_are_the_peers(case: Case) -> None:
    given = {
        name: torch.tensor(case.inputs[name], dtype=torch.float64)
        for name in ("hidden", "weight", "temperature")
    }
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    count = len(hidden)
    loss, _, _ = fused_policy_loss(
        hidden,
        weight,
        torch.tensor(case.inputs["targets"]),
        given["temperature"],
        lambda logprobs, _: torch.zeros_like(logprobs) * logprobs,
        chunk=4,
        entropy_weights=lambda span: torch.full((count,), 1.0 / count).double()[span],
    )
    agree(loss.detach(), case.outputs["value"])
    loss.backward()
    agree(hidden.grad, case.outputs["hidden_gradient"])
    agree(weight.grad, case.outputs["weight_gradient"])


@each(chosen("value", ["clipped", "clipped_sequence_mean"]))
def test_the_value_loss_and_its_gradient_are_the_peers(case: Case) -> None:
    given = Packed(case.inputs)
    values = given["new_values"].requires_grad_()
    found = clipped_value_loss(values, given["values"], given["returns"], case.settings["clip"])
    name = "sequence_mean" if case.name.endswith("sequence_mean") else "token_mean"
    per_sequence = torch.from_numpy(REDUCTIONS[name](given.lengths, NORM_TOKENS))
    loss = (found.loss * per_sequence.repeat_interleave(torch.tensor(given.lengths))).sum()
    assert found.clipped.any()
    agree(loss.detach(), case.outputs["value"])
    agree(gradient_of(loss, values), given.of(case.outputs["gradient"]))


@each(chosen("overlong", ["soft", "soft_half"]))
def test_the_soft_penalty_of_length_is_the_peers(case: Case) -> None:
    agree(penalties(case), case.outputs["penalties"])
