"""Writes fixtures/skyrl.json, in an environment that has SkyRL: see README.md."""

import importlib
import typing
from typing import Any

import numpy as np
import torch
import typing_extensions
from torch import Tensor

from tests.parity import inputs
from tests.parity.fixtures import Recorder
from tests.parity.recording import tensors, with_gradient

# SkyRL's API types use TypedDict in a way that pydantic accepts from Python 3.12 on. No formula
# is concerned.
typing.TypedDict = typing_extensions.TypedDict

skyrl: Any = importlib.import_module("skyrl")
utils: Any = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
off_policy: Any = importlib.import_module(
    "skyrl.backends.skyrl_train.utils.off_policy_correction_utils"
)
config: Any = importlib.import_module("skyrl.train.config")

_UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils."
_OFF_POLICY = "skyrl.backends.skyrl_train.utils.off_policy_correction_utils."


def algorithm(**settings: Any) -> Any:
    """SkyRL's own configuration; `cispo`, `sapo` and `off_policy_correction` are tables of it."""
    made = config.AlgorithmConfig()
    for name, value in settings.items():
        if not isinstance(value, dict):
            setattr(made, name, value)
            continue
        for key, inner in value.items():
            setattr(getattr(made, name), key, inner)
    return made


def add_advantages(record: Recorder) -> None:
    rewards = inputs.rewards()
    record.inputs["rewards"] = rewards
    scores = torch.tensor(rewards["reward"], dtype=torch.float64)[:, None]
    index = np.array(rewards["group"], dtype=object)
    for name, function, settings in (
        ("grpo", "compute_grpo_outcome_advantage", {}),
        ("dr_grpo", "compute_grpo_outcome_advantage", {"grpo_norm_by_std": False}),
        ("rloo", "compute_rloo_outcome_advantage", {}),
        ("max_rl", "compute_maxrl_advantage", {}),
        ("max_rl_unfloored", "compute_maxrl_advantage", {"epsilon": 0.0}),
    ):
        advantages, _ = getattr(utils, function)(
            scores.clone(), torch.ones_like(scores), index, **settings
        )
        outputs = {"advantages": advantages[:, 0].tolist()}
        record.add("advantage", name, _UTILS + function, "rewards", outputs, **settings)


def add_token_advantages(record: Recorder) -> None:
    record.inputs["episodes"] = inputs.episodes()
    given = tensors(record.inputs["episodes"])
    advantages, _ = utils.compute_reinforce_plus_plus_outcome_advantage(
        given["rewards"], given["mask"], gamma=1.0
    )
    function = _UTILS + "compute_reinforce_plus_plus_outcome_advantage"
    outputs = {"advantages": advantages.tolist()}
    record.add("advantage", "reinforce_pp", function, "episodes", outputs, gamma=1.0)


def add_losses(record: Recorder) -> None:
    record.inputs["tokens"] = inputs.tokens()
    record.inputs["sequences"] = inputs.sequences()
    higher = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
    tight = {"eps_clip_low": 0.03, "eps_clip_high": 0.07}
    bounds = {"cispo": {"cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.28}}
    gates = {"sapo": {"tau_pos": 1.0, "tau_neg": 1.05}}
    variation = {"dppo_type": "binary_tv", "delta_low": 0.05, "delta_high": 0.1}
    divergence = {"dppo_type": "binary_kl", "delta_low": 0.01, "delta_high": 0.03}
    # Its covariances are of advantages that have been divided by the number of tokens.
    count = sum(sum(row) for row in inputs.mask())
    every = {"clip_ratio": 1.0, "clip_cov_lb": 0.5 / count, "clip_cov_ub": 5.0 / count}
    for name, kind, given, reduction, settings in (
        ("ppo_clip_higher", "regular", "tokens", "token_mean", higher),
        ("ppo_clip_sequence_mean", "regular", "tokens", "sequence_mean", higher),
        ("ppo_clip_sum_norm", "regular", "tokens", "seq_mean_token_sum_norm", higher),
        ("dual_clip", "dual_clip", "tokens", "token_mean", higher | {"clip_ratio_c": 3.0}),
        ("gspo", "gspo", "sequences", "sequence_mean", tight),
        ("cispo", "cispo", "tokens", "token_mean", bounds),
        ("sapo", "sapo", "tokens", "sequence_mean", gates),
        ("dppo_ratio", "dppo", "tokens", "token_mean", {"dppo": variation}),
        ("dppo_kl_ratio", "dppo", "tokens", "token_mean", {"dppo": divergence}),
        ("clip_cov", "clip_cov", "tokens", "token_mean", higher | {"clip_cov": every}),
        ("importance_sampling", "importance_sampling", "tokens", "token_mean", {}),
    ):
        outputs = policy_loss(tensors(record.inputs[given]), kind, reduction, settings)
        path = _UTILS + utils.PolicyLossRegistry.get(kind).__name__
        record.add("loss", name, path, given, outputs, reduction=reduction, **settings)


def policy_loss(
    given: dict[str, Tensor], kind: str, reduction: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """SkyRL's losses are sums: it puts the reduction into the advantages beforehand."""
    made = algorithm(policy_loss_type=kind, loss_reduction=reduction, **settings)
    scaled = utils.apply_loss_reduction_to_advantages_minibatch(
        given["advantages"], given["mask"], reduction, micro_batch_size=8, max_seq_len=16
    )
    function = utils.PolicyLossRegistry.get(kind)

    def loss(logprobs: Tensor) -> Tensor:
        sampler = given.get("sampler")
        value, _ = function(logprobs, given["old"], scaled, made, given["mask"], sampler)
        return value

    return with_gradient(loss, given["logprobs"])


CORRECTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("token_tis", {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}),
    ("sequence_tis", {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 3.0}),
    (
        "token_mask",
        {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 4.0},
    ),
    (
        "sequence_mask_product",
        {"sequence_mask_metric": "product", "product_mask_low": 0.2, "product_mask_high": 3.0},
    ),
    (
        "sequence_mask_geometric",
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.8, "geo_mask_high": 1.15},
    ),
)


def add_corrections(record: Recorder) -> None:
    record.inputs["mismatch"] = inputs.mismatch()
    given = tensors(record.inputs["mismatch"])
    for name, settings in CORRECTIONS:
        options = algorithm(off_policy_correction=settings).off_policy_correction
        weights, _, kept = off_policy.compute_off_policy_correction(
            given["trainer"], given["sampler"], given["mask"], options
        )
        outputs = {"kept": kept.tolist()}
        if weights is not None:
            outputs["weights"] = weights.expand_as(kept).tolist()
        path = _OFF_POLICY + "compute_off_policy_correction"
        record.add("correction", name, path, "mismatch", outputs, **settings)
    corrected = {
        "off_policy_correction": {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 2.0,
            "sequence_mask_metric": "geometric",
            "geo_mask_low": 0.8,
            "geo_mask_high": 1.15,
        }
    }
    settings = {"eps_clip_low": 0.2, "eps_clip_high": 0.28, **corrected}
    given["old"] = given["trainer"]
    outputs = policy_loss(given, "regular", "token_mean", settings)
    path = _UTILS + "ppo_policy_loss"
    record.add("correction", "decoupled_token_tis_geometric", path, "mismatch", outputs, **settings)


def add_kl(record: Recorder) -> None:
    given = tensors(record.inputs["tokens"])
    for estimator in ("k1", "k2", "k3", "abs"):

        def penalty(logprobs: Tensor, estimator: str = estimator) -> Tensor:
            return utils.compute_approx_kl(
                logprobs, given["reference"], given["mask"], kl_estimator_type=estimator
            )

        outputs = with_gradient(penalty, given["logprobs"])
        record.add("kl", estimator, _UTILS + "compute_approx_kl", "tokens", outputs)


def add_value_loss(record: Recorder) -> None:
    given = tensors(record.inputs["episodes"])
    settings = algorithm(value_clip=0.2)

    def loss(values: Tensor) -> Tensor:
        value, _ = utils.ppo_critic_loss(
            values, given["values"], given["returns"], settings, given["mask"]
        )
        return value

    outputs = with_gradient(loss, given["new_values"])
    path = _UTILS + "ppo_critic_loss"
    record.add("value", "clipped_sequence_mean", path, "episodes", outputs, clip=0.2)


def main() -> None:
    record = Recorder("skyrl", skyrl.__version__)
    add_advantages(record)
    add_token_advantages(record)
    add_losses(record)
    add_corrections(record)
    add_kl(record)
    add_value_loss(record)
    print(record.write())


if __name__ == "__main__":
    main()
