"""Writes fixtures/verl.json, in an environment that has verl: see README.md."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.parity import inputs
from tests.parity.fixtures import Recorder

verl: Any = importlib.import_module("verl")
core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
corrections: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
configs: Any = importlib.import_module("verl.workers.config")
configs_algorithm: Any = importlib.import_module("verl.trainer.config.algorithm")
ray_trainer: Any = importlib.import_module("verl.trainer.ppo.ray_trainer")
dapo: Any = importlib.import_module("verl.workers.reward_manager.dapo")

_CORE = "verl.trainer.ppo.core_algos."
_CORRECTIONS = "verl.trainer.ppo.rollout_corr_helper."
# Larger than any ratio: verl's ppo loss is the dual clip, and this takes the second clip away.
_NO_DUAL_CLIP = 1e12


def tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def with_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> dict[str, Any]:
    """The value of a function (its sum, when it gives a tensor) and its gradient."""
    leaf = at.clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return {"value": value.tolist(), "gradient": gradient.tolist()}


def actor(**settings: Any) -> Any:
    return configs.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings
    )


def add_advantages(record: Recorder) -> None:
    rewards = inputs.rewards()
    record.inputs["rewards"] = rewards
    # One token each: the reward is that of the sequence.
    scores = torch.tensor(rewards["reward"], dtype=torch.float64)[:, None]
    index = np.array(rewards["group"], dtype=object)
    for name, function, settings in (
        ("grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True}),
        ("dr_grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "compute_rloo_outcome_advantage", {}),
        ("rloo_vectorized", "compute_rloo_vectorized_outcome_advantage", {}),
    ):
        advantages, _ = getattr(core, function)(
            scores.clone(), torch.ones_like(scores), index, **settings
        )
        outputs = {"advantages": advantages[:, 0].tolist()}
        record.add("advantage", name, _CORE + function, "rewards", outputs, **settings)


def add_token_advantages(record: Recorder) -> None:
    """Estimators of one advantage per token: of returns, with and without a KL in the rewards."""
    episodes = inputs.episodes()
    record.inputs["episodes"] = episodes
    given = tensors(episodes)
    shaped = given["rewards"] - given["penalties"] * given["mask"]
    for suffix, rewards in (("", given["rewards"]), ("_kl_in_reward", shaped)):
        advantages, _ = core.compute_reinforce_plus_plus_outcome_advantage(
            rewards, given["mask"], SimpleNamespace(gamma=1.0)
        )
        record.add(
            "advantage",
            "reinforce_pp" + suffix,
            _CORE + "compute_reinforce_plus_plus_outcome_advantage",
            "episodes",
            {"advantages": advantages.tolist()},
            gamma=1.0,
        )
    for name, rewards, gamma, lam in (
        ("gae", given["rewards"], 0.97, 0.9),
        ("gae_undiscounted", given["rewards"], 1.0, 1.0),
        ("gae_kl_in_reward", shaped, 0.99, 0.95),
    ):
        advantages, returns = core.compute_gae_advantage_return(
            rewards, given["values"], given["mask"], gamma, lam
        )
        record.add(
            "advantage",
            name,
            _CORE + "compute_gae_advantage_return",
            "episodes",
            {"advantages": advantages.tolist(), "returns": returns.tolist()},
            gamma=gamma,
            lam=lam,
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
    single = {"clip_ratio_c": _NO_DUAL_CLIP}
    gates = {"tau_pos": 1.0, "tau_neg": 1.05}
    for name, mode, given, reduction, settings in (
        ("ppo_clip", "vanilla", "tokens", "token-mean", symmetric | single),
        ("ppo_clip_higher", "vanilla", "tokens", "token-mean", higher | single),
        ("ppo_clip_extremes", "vanilla", "extremes", "token-mean", higher | single),
        ("dual_clip", "vanilla", "tokens", "token-mean", higher | {"clip_ratio_c": 3.0}),
        ("dual_clip_extremes", "vanilla", "extremes", "token-mean", higher | {"clip_ratio_c": 3.0}),
        ("gspo", "gspo", "sequences", "seq-mean-token-mean", tight),
        ("gspo_token_mean", "gspo", "sequences", "token-mean", tight),
        ("gspo_by_token", "gspo", "sequences_by_token", "seq-mean-token-mean", tight),
        ("ppo_clip_by_token", "vanilla", "sequences_by_token", "token-mean", tight | single),
        ("gspo_tokens", "gspo", "tokens", "seq-mean-token-mean", higher),
        ("gspo_far", "gspo", "far_sequences", "seq-mean-token-mean", tight),
        ("cispo", "cispo", "tokens", "token-mean", higher),
        ("sapo", "sapo", "tokens", "seq-mean-token-mean", gates),
        ("sapo_sharp", "sapo", "tokens", "seq-mean-token-mean", {"tau_pos": 2.5, "tau_neg": 4.0}),
    ):
        outputs = policy_loss(tensors(dict(record.inputs[given])), mode, reduction, settings)
        path = core.get_policy_loss_fn(mode).__name__
        record.add("loss", name, _CORE + path, given, outputs, reduction=reduction, **settings)


def policy_loss(
    given: dict[str, Tensor],
    mode: str,
    reduction: str,
    settings: dict[str, Any],
    weights: Tensor | None = None,
) -> dict[str, Any]:
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
    given = tensors(dict(record.inputs["tokens"]))
    outputs = policy_loss(given, "bypass_mode", "token-mean", settings)
    path = _CORE + "compute_policy_loss_bypass_mode"
    record.add("loss", "truncated_reinforce", path, "tokens", outputs, cap=2.0)


def add_kl(record: Recorder) -> None:
    for given in ("tokens", "extremes"):
        values = tensors(dict(record.inputs[given]))
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
    given = tensors(dict(record.inputs["tokens"]))
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
    given = tensors(dict(record.inputs["tokens"]))
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
        # Micro-batches of 3 and 5 sequences, told of the whole batch.
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


def add_corrections(record: Recorder) -> None:
    record.inputs["mismatch"] = inputs.mismatch()
    given = tensors(dict(record.inputs["mismatch"]))
    log_ratio = given["trainer"] - given["sampler"]
    for name, level, threshold in (
        ("token_tis", "token", 2.0),
        ("sequence_tis", "sequence", 3.0),
        ("icepop", "token", "0.5_2.0"),
    ):
        weights, _ = corrections.compute_rollout_correction_weights(
            log_ratio, given["mask"], level, threshold
        )
        record.add(
            "correction",
            name,
            _CORRECTIONS + "compute_rollout_correction_weights",
            "mismatch",
            {"weights": weights.tolist()},
            level=level,
            threshold=threshold,
        )
    for name, option, low, high in (
        ("token_mask", "token_k1", 0.5, 4.0),
        ("sequence_mask_product", "seq_sum_k1", 0.2, 3.0),
        ("sequence_mask_geometric", "seq_mean_k1", 0.8, 1.15),
    ):
        # verl bounds sampler / trainer, so the bounds of trainer / sampler are inverted.
        kept, _ = corrections.compute_rollout_rejection_mask(
            log_ratio, given["mask"], option, f"{1 / high!r}_{1 / low!r}"
        )
        record.add(
            "correction",
            name,
            _CORRECTIONS + "compute_rollout_rejection_mask",
            "mismatch",
            {"kept": kept.tolist()},
            option=option,
            low=low,
            high=high,
        )


def add_corrected_losses(record: Recorder) -> None:
    """Decoupled PPO (ratio against the trainer before the step) with weights and masks."""
    given = tensors(dict(record.inputs["mismatch"]))
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


def add_entropy(record: Recorder) -> None:
    record.inputs["head"] = inputs.head()
    given = tensors(dict(record.inputs["head"]))
    hidden = given["hidden"].requires_grad_()
    weight = given["weight"].requires_grad_()
    logits = (hidden @ weight.t())[None] / given["temperature"][0]
    entropy = core.compute_entropy_loss(logits, torch.ones(1, len(hidden), dtype=torch.float64))
    by_hidden, by_weight = torch.autograd.grad(entropy, (hidden, weight))
    outputs = {
        "value": entropy.item(),
        "hidden_gradient": by_hidden.tolist(),
        "weight_gradient": by_weight.tolist(),
    }
    record.add("entropy", "mean", _CORE + "compute_entropy_loss", "head", outputs)


def add_value_loss(record: Recorder) -> None:
    given = tensors(dict(record.inputs["episodes"]))

    def loss(values: Tensor) -> Tensor:
        value, _ = core.compute_value_loss(
            values, given["returns"], given["values"], given["mask"], cliprange_value=0.2
        )
        return value

    outputs = with_gradient(loss, given["new_values"])
    record.add("value", "clipped", _CORE + "compute_value_loss", "episodes", outputs, clip=0.2)


def add_overlong(record: Recorder) -> None:
    record.inputs["lengths"] = inputs.lengths()
    lengths = torch.tensor(inputs.lengths()["tokens"])
    for name, limit, weight in (("soft", 10, 1.0), ("soft_half", 10, 0.5), ("soft_beyond", 8, 1.0)):
        manager = dapo.DAPORewardManager(
            tokenizer=SimpleNamespace(decode=lambda *_, **__: "", eos_token="<eos>"),
            num_examine=0,
            compute_score=lambda **_: 0.0,
            max_resp_len=limit,
            overlong_buffer_cfg=SimpleNamespace(
                enable=True, len=4, penalty_factor=weight, log=True
            ),
        )
        found = manager(responses(lengths), return_dict=True)["reward_extra_info"]
        record.add(
            "overlong",
            name,
            "verl.workers.reward_manager.dapo.DAPORewardManager",
            "lengths",
            {"penalties": [float(penalty) for penalty in found["overlong_reward"]]},
            limit=limit,
            buffer=4,
            weight=weight,
        )


def responses(lengths: Tensor) -> Any:
    """A batch of verl's with responses of these lengths, after prompts of one token."""
    count, longest = len(lengths), int(lengths.max())
    within = torch.arange(longest)[None] < lengths[:, None]
    return verl.DataProto.from_dict(
        tensors={
            "prompts": torch.ones(count, 1, dtype=torch.int64),
            "responses": torch.ones(count, longest, dtype=torch.int64),
            "attention_mask": torch.cat([torch.ones(count, 1), within], 1).long(),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * count, dtype=object),
            "data_source": np.array(["parity"] * count, dtype=object),
        },
    )


def main() -> None:
    record = Recorder("verl", verl.__version__)
    add_advantages(record)
    add_token_advantages(record)
    add_losses(record)
    add_truncated_reinforce(record)
    add_kl(record)
    add_kl_in_reward(record)
    add_reductions(record)
    add_corrections(record)
    add_corrected_losses(record)
    add_entropy(record)
    add_value_loss(record)
    add_overlong(record)
    print(record.write())


if __name__ == "__main__":
    main()
