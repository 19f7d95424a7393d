"""The cases of verl beside its losses: advantages, corrections, entropy, values, penalties."""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.parity import inputs
from tests.parity.fixtures import Recorder
from tests.parity.recording import tensors, with_gradient

verl: Any = importlib.import_module("verl")
core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
corrections: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
configs: Any = importlib.import_module("verl.trainer.config")
dapo: Any = importlib.import_module("verl.workers.reward_manager.dapo")

_CORE = "verl.trainer.ppo.core_algos."
_CORRECTIONS = "verl.trainer.ppo.rollout_corr_helper."


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


def add_grouped_advantages(record: Recorder) -> None:
    """Record estimators that depend on both the groups and the lengths of attempts."""
    for name, function in (
        ("opo", "compute_opo_outcome_advantage"),
        ("reinforce_pp_baseline", "compute_reinforce_plus_plus_baseline_outcome_advantage"),
    ):
        for suffix, lone in (("", False), ("_lone", True)):
            episodes = inputs.grouped_episodes(lone)
            record.inputs["grouped_episodes" + suffix] = episodes
            rewards, mask = (torch.tensor(episodes[key]).double() for key in ("rewards", "mask"))
            index = np.array(episodes["group"], dtype=object)
            advantages, _ = getattr(core, function)(rewards, mask, index)
            outputs = {"advantages": advantages.tolist()}
            given = "grouped_episodes" + suffix
            record.add("advantage", name + suffix, _CORE + function, given, outputs)


def add_named_rewards(record: Recorder) -> None:
    """Record GDPO, which takes its rewards from the batch by name."""
    given = inputs.named_rewards()
    record.inputs["named_rewards"] = given
    mask = torch.tensor(given["mask"]).double()
    weights = {"correct": 1.0, "style": 0.5}
    config = configs.AlgoConfig(
        gdpo_reward_keys=list(weights), gdpo_reward_weights=list(weights.values())
    )
    advantages, _ = core.compute_gdpo_outcome_advantage(
        torch.zeros_like(mask),
        mask,
        np.array(given["group"], dtype=object),
        config=config,
        non_tensor_batch={name: np.array(given[name]) for name in weights},
        # After a prompt of one token every position is a place for the reward.
        batch={
            "prompts": torch.ones(len(mask), 1),
            "attention_mask": torch.ones(len(mask), 1 + mask.shape[1], dtype=torch.int64),
        },
    )
    outputs = {"advantages": advantages.tolist()}
    function = _CORE + "compute_gdpo_outcome_advantage"
    record.add("advantage", "gdpo", function, "named_rewards", outputs, weights=weights)


def add_corrections(record: Recorder) -> None:
    record.inputs["mismatch"] = inputs.mismatch()
    given = tensors(record.inputs["mismatch"])
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


def add_entropy(record: Recorder) -> None:
    record.inputs["head"] = inputs.head()
    given = tensors(record.inputs["head"])
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
    given = tensors(record.inputs["episodes"])

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
