"""The gradient that a whole step hands to its optimizer, against TRL's on the same tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch, TrainSequence
from tests.parity import tiny
from tests.parity.fixtures import Case
from tests.parity.support import chosen, each
from tests.parity.test_losses import LOSSES, configured
from tests.support.rank_configs import policy_config

# Both run in float32, TRL's head whatever the model's type.
FLOAT32 = 1e-5
STEPS: Mapping[str, dict[str, Any]] = {
    "ppo_clip": LOSSES["ppo_clip_higher"],
    "ppo_clip_entropy": {**LOSSES["ppo_clip_higher"], "entropy_coefficient": 0.01},
    "ppo_clip_kl": {**LOSSES["ppo_clip_higher"], "kl": {"coefficient": 0.1}},
    "gspo": LOSSES["gspo"],
}


def listen(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Filled with the gradients, as they stand after the last pack of a step."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            seen[name] = gradient.clone()

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: keep(name, p.grad))
    return seen


def batch(inputs: Mapping[str, Any]) -> TrainBatch:
    return TrainBatch(1, tuple(_sequence(inputs, place) for place in range(len(inputs["groups"]))))


def _sequence(inputs: Mapping[str, Any], place: int) -> TrainSequence:
    prompt = inputs["prompts"][place]
    present = np.array(inputs["present"][place], np.bool_)
    unwritten = np.zeros(len(prompt))

    def whole(head: Any, name: str) -> Any:
        return np.concatenate([head, np.array(inputs[name][place])[present]])

    mask = whole(unwritten, "mask").astype(np.bool_)
    return TrainSequence(
        group_id=inputs["groups"][place],
        attempt_index=place,
        reward=inputs["rewards"][place],
        token_ids=whole(prompt, "completions").astype(np.int32),
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, whole(unwritten, "behaviour"), 0.0).astype(np.float32),
        temperature=tiny.TEMPERATURE,
        staleness=0,
    )


@each(chosen("step", STEPS))
def test_a_step_hands_its_optimizer_the_gradient_of_the_peer(case: Case, tmp_path: Path) -> None:
    tiny.policy(transformers).float().save_pretrained(tmp_path / "policy")
    tiny.policy(transformers, tiny.REFERENCE).float().save_pretrained(tmp_path / "reference")
    rank = RankConfig(pack_tokens=20, head_chunk=5, post_update_tokens=0)
    policy = load_policy(policy_config(tmp_path / "policy"), rank)
    reference = ReferencePolicy.from_config(
        policy_config(tmp_path / "reference"), policy, offload=False
    )
    optimizer = Optimizer(policy.named_parameters(), OptimizerConfig(lr=1e-3))
    seen = listen(policy.named_parameters())
    algorithm = configured({"advantage": "dr_grpo", **STEPS[case.name]})
    found = Trainer(policy, optimizer, algorithm, rank, reference=reference).train_step(
        batch(case.inputs), 1e-3
    )
    assert abs(found.metrics["policy/loss"] - case.outputs["value"]) < FLOAT32
    theirs = case.outputs["gradients"]
    assert seen.keys() == theirs.keys()
    ours = torch.cat([seen[name].flatten() for name in theirs])
    expected = torch.cat([torch.tensor(values) for values in theirs.values()])
    assert expected.abs().max() > 0.05
    assert (ours - expected).abs().max() < FLOAT32 * expected.abs().max()
