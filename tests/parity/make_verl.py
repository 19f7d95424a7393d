"""Writes fixtures/verl.json, in an environment that has verl: see README.md."""

import importlib
from typing import Any

import torch
from torch import Tensor

from tests.parity import inputs, verl_terms
from tests.parity.fixtures import Recorder
from tests.parity.recording import tensors, with_gradient

verl: Any = importlib.import_module("verl")
core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
corrections: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
configs: Any = importlib.import_module("verl.workers.config")
configs_algorithm: Any = importlib.import_module("verl.trainer.config.algorithm")
ray_trainer: Any = importlib.import_module("verl.trainer.ppo.ray_trainer")

_CORE = "verl.trainer.ppo.core_algos."
# Larger than any ratio: verl's ppo loss is the dual clip, and this takes the second clip away.
_NO_DUAL_CLIP = 1e12


def actor(**settings: Any) -> Any:
    return configs.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings
    )


def add_losses(record: Recorder) -> None:
    record.inputs["tokens"] = inputs.tokens()
    record.inputs["sequences"] = inputs.sequences()
    record.inputs["sequences_by_token"] = inputs.sequences_by_token()
    record.inputs["extremes"] = inputs.extremes()
    record.inputs["far_sequences"] = inputs.far_sequences()
    symmetric = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    higher = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    tight = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.07}
    # The tokens' probabilities move by less than their ratios.
    narrow = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
    divergences = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.03}
    single = {"clip_ratio_c": _NO_DUAL_CLIP}
    gates = {"tau_pos": 1.0, "tau_neg": 1.05}
    every, none, some = (
        {"clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": 5.0}
        for share, low in ((1.0, 0.5), (1.0, 4.99), (0.1, 0.5))
    )
    for name, mode, given, reduction, settings in (
        ("ppo_clip", "vanilla", "tokens", "token-mean", symmetric | single),
        ("ppo_clip_higher", "vanilla", "tokens", "token-mean", higher | single),
        ("ppo_clip_extremes", "vanilla", "extremes", "token-mean", higher | single),
        ("dual_clip", "vanilla", "tokens", "token-mean", higher | {"clip_ratio_c": 3.0}),
        ("dual_clip_extremes", "vanilla", "extremes", "token-mean", higher | {"clip_ratio_c": 3.0}),
        ("clip_cov", "clip_cov", "tokens", "token-mean", higher | {"policy_loss": every}),
        ("clip_cov_none", "clip_cov", "tokens", "token-mean", higher | {"policy_loss": none}),
        ("clip_cov_some", "clip_cov", "tokens", "token-mean", higher | {"policy_loss": some}),
        ("gspo", "gspo", "sequences", "seq-mean-token-mean", tight),
        ("gspo_token_mean", "gspo", "sequences", "token-mean", tight),
        ("gspo_by_token", "gspo", "sequences_by_token", "seq-mean-token-mean", tight),
        ("ppo_clip_by_token", "vanilla", "sequences_by_token", "token-mean", tight | single),
        ("gspo_tokens", "gspo", "tokens", "seq-mean-token-mean", higher),
        ("gspo_far", "gspo", "far_sequences", "seq-mean-token-mean", tight),
        ("cispo", "cispo", "tokens", "token-mean", higher),
        ("dppo", "dppo_tv", "tokens", "token-mean", narrow | single),
        ("dppo_kl", "dppo_kl", "tokens", "token-mean", divergences | single),
        ("sapo", "sapo", "tokens", "seq-mean-token-mean", gates),
        ("sapo_sharp", "sapo", "tokens", "seq-mean-token-mean", {"tau_pos": 2.5, "tau_neg": 4.0}),
    ):
        outputs = policy_loss(tensors(record.inputs[given]), mode, reduction, settings)
        path = core.get_policy_loss_fn(mode).__name__
        record.add("loss", name, _CORE + path, given, outputs, reduction=reduction, **settings)


def policy_loss(
    given: dict[str, Tensor],
    mode: str,
    reduction: str,
    settings: dict[str, Any],
    weights: Tensor | None = None,
) -> dict[str, Any]:
    if isinstance(chosen := settings.get("policy_loss"), dict):
        # In the fixtures it is a dictionary.
        settings = settings | {"policy_loss": configs.PolicyLossConfig(**chosen)}
    config = actor(**settings)
    function = core.get_policy_loss_fn(mode)

    def loss(logprobs: Tensor) -> Tensor:
        value, _ = function(
            given["old"],
            logprobs,
            given["advantages"],
            given["mask"],
            loss_agg_mode=reduction,
            config=config,
            rollout_is_weights=weights,
        )
        return value

    return with_gradient(loss, given["logprobs"])


def add_truncated_reinforce(record: Recorder) -> None:
    """REINFORCE on what the sampler wrote, weighted by the policy's ratio to it up to a cap."""
    correction = configs_algorithm.RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_threshold=2.0
    )
    settings = {"policy_loss": configs.PolicyLossConfig(rollout_correction=correction)}
    given = tensors(record.inputs["tokens"])
    outputs = policy_loss(given, "bypass_mode", "token-mean", settings)
    path = _CORE + "compute_policy_loss_bypass_mode"
    record.add("loss", "truncated_reinforce", path, "tokens", outputs, cap=2.0)


def add_kl(record: Recorder) -> None:
    for given in ("tokens", "extremes"):
        values = tensors(record.inputs[given])
        for estimator in ("k1", "k2", "k3", "abs"):

            def penalty(
                logprobs: Tensor,
                reference: Tensor = values["reference"],
                estimator: str = estimator,
            ) -> Tensor:
                return core.kl_penalty(logprobs, reference, estimator)

            name = estimator if given == "tokens" else f"{estimator}_extremes"
            outputs = with_gradient(penalty, values["logprobs"])
            record.add("kl", name, _CORE + "kl_penalty", given, outputs)


def add_kl_in_reward(record: Recorder) -> None:
    """Rewards per token once the KL to the reference is taken off them."""
    given = tensors(record.inputs["tokens"])
    outcomes = torch.zeros_like(given["mask"])
    data = verl.DataProto.from_dict(
        tensors={
            "response_mask": given["mask"],
            "token_level_scores": outcomes,
            "old_log_probs": given["old"],
            "ref_log_prob": given["reference"],
        }
    )
    for estimator in ("k1", "k2", "k3", "abs"):
        control = core.FixedKLController(kl_coef=0.05)
        shaped, _ = ray_trainer.apply_kl_penalty(data, control, kl_penalty=estimator)
        record.add(
            "kl",
            f"reward_{estimator}",
            "verl.trainer.ppo.ray_trainer.apply_kl_penalty",
            "tokens",
            {"rewards": shaped.batch["token_level_rewards"].tolist()},
            coefficient=0.05,
        )


def add_reductions(record: Recorder) -> None:
    given = tensors(record.inputs["tokens"])
    mask = given["mask"]
    totals = {"batch_num_tokens": mask.sum().item(), "global_batch_size": len(mask)}
    for mode, extra in (
        ("token-mean", {}),
        ("seq-mean-token-mean", {}),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 16}),
    ):
        whole = with_gradient(
            lambda x, mode=mode, extra=extra: core.agg_loss(x, mask, mode, **extra),
            given["logprobs"],
        )
        record.add("reduction", mode, _CORE + "agg_loss", "tokens", whole, **extra)
        # Micro-batches of 3 and 5 sequences, given the size of the whole batch.
        parts = [
            with_gradient(
                lambda x, mode=mode, extra=extra, rows=rows: core.agg_loss(
                    x, mask[rows], mode, **totals, **extra
                ),
                given["logprobs"][rows],
            )
            for rows in (slice(0, 3), slice(3, 8))
        ]
        outputs = {
            "value": sum(part["value"] for part in parts),
            "gradient": [row for part in parts for row in part["gradient"]],
        }
        record.add("reduction", mode + ":parts", _CORE + "agg_loss", "tokens", outputs, **extra)


def add_corrected_losses(record: Recorder) -> None:
    """Decoupled PPO (ratio against the trainer before the step) with weights and masks."""
    given = tensors(record.inputs["mismatch"])
    given["old"] = given["trainer"]
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": _NO_DUAL_CLIP}
    whole = clips | {"global_batch_info": {"batch_num_tokens": given["mask"].sum().item()}}
    token_tis = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    masks = {
        "rollout_rs": "token_k1,seq_mean_k1",
        "rollout_rs_threshold": f"{1 / 4.0!r}_{1 / 0.5!r},{1 / 1.15!r}_{1 / 0.8!r}",
    }
    for name, settings, options in (
        ("decoupled", clips, {}),
        ("decoupled_token_tis", clips, token_tis),
        (
            "decoupled_sequence_tis",
            clips,
            {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
        ),
        ("decoupled_token_tis_masks", whole, token_tis | masks),
        ("decoupled_token_tis_masks_kept_mean", clips, token_tis | masks),
    ):
        weights, kept, _ = corrections.compute_rollout_correction_and_rejection_mask(
            given["trainer"], given["sampler"], given["mask"], **options
        )
        outputs = policy_loss(
            given | {"mask": kept},
            "vanilla",
            "token-mean",
            settings,
            None if weights is None else weights.batch["rollout_is_weights"],
        )
        path = _CORE + "compute_policy_loss_vanilla"
        record.add("correction", name, path, "mismatch", outputs, **settings, **options)


def main() -> None:
    record = Recorder("verl", verl.__version__)
    verl_terms.add_advantages(record)
    verl_terms.add_token_advantages(record)
    verl_terms.add_grouped_advantages(record)
    verl_terms.add_named_rewards(record)
    add_losses(record)
    add_truncated_reinforce(record)
    add_kl(record)
    add_kl_in_reward(record)
    add_reductions(record)
    verl_terms.add_corrections(record)
    add_corrected_losses(record)
    verl_terms.add_entropy(record)
    verl_terms.add_value_loss(record)
    verl_terms.add_overlong(record)
    print(record.write())


if __name__ == "__main__":
    main()
