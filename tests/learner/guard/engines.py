"""Engines that compute their logprobs with torch, set up like the trainer or otherwise."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.guard.diagnosis import Diagnosis, diagnose_mismatch
from flotilla_learner.guard.mismatch_limits import BOUNDS
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import Comparison, TrainBatch, TrainSequence
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import VOCAB

TEMPERATURE = 0.8
RANK = RankConfig(head_chunk=64)


@dataclass(frozen=True, slots=True)
class Trainer:
    """The model that a rank holds to compare with."""

    config: PolicyConfig
    policy: Policy
    slots: WeightSlots
    comparing: CompareCommand

    @staticmethod
    def of(model: Path, folder: Path, **changes: object) -> "Trainer":
        """A trainer whose version 0 is published."""
        config = policy_config(model, **changes)
        policy = load_policy(config, RANK)
        slots = WeightSlots(policy.named_parameters(), policy.compute_dtype, folder, "guard")
        slots.write_version(0)
        return Trainer(config, policy, slots, CompareCommand(policy, slots, config, RANK))

    def judged(self, batch: TrainBatch) -> Comparison:
        return self.comparing.run_comparison(batch, batch.step - 1, diagnose=True)

    def diagnosis(self, batch: TrainBatch) -> Diagnosis:
        """Return the diagnosis of an engine that must be over the bound."""
        comparison = self.judged(batch)
        found = comparison.versions[batch.step - 1]
        assert BOUNDS[self.config.dtype].find_excesses(0, found)
        return diagnose_mismatch(found, comparison, self.config, TEMPERATURE)


def sampled(engine: Policy, *, temperature: float = TEMPERATURE, version: int = 0) -> TrainBatch:
    """Return what an engine reports to have sampled; the learner requested TEMPERATURE."""
    rng = np.random.default_rng(1)
    rows = tuple(_row(engine, rng, index, temperature) for index in range(8))
    return TrainBatch(version + 1, rows)


def _row(engine: Policy, rng: np.random.Generator, index: int, temperature: float) -> TrainSequence:
    length = int(rng.integers(60, 120))
    ids = rng.integers(0, VOCAB, length).astype(np.int32)
    mask = np.arange(length) >= 5
    logprobs = np.zeros(length, np.float32)
    logprobs[1:] = scores(engine, ids, temperature)
    return TrainSequence(
        group_id="g",
        attempt_index=index,
        reward=1.0,
        token_ids=ids,
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, logprobs, np.float32(0)),
        temperature=TEMPERATURE,
        staleness=0,
    )


@torch.no_grad()
def scores(engine: Policy, ids: np.ndarray, temperature: float) -> np.ndarray:
    """Score by the model's own forward pass, logits and all, in the dtype of its parameters."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = engine.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None]).squeeze(1).numpy()


def in_dtype(policy: Policy, dtype: torch.dtype) -> Policy:
    """The model as an engine of that dtype would hold it."""
    model: Any = torch.nn.Module.to(copy.deepcopy(policy.model), dtype)
    return replace(policy, model=model)


def with_experts_laid_out_otherwise(policy: Policy) -> Policy:
    """An engine that reads each expert in blocks of columns, where they lie in rows."""
    changed = copy.deepcopy(policy.model)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if ".experts." in name:
                parameter.copy_(parameter.transpose(1, 2).reshape(parameter.shape))
    return replace(policy, model=changed)


def with_other_head(policy: Policy, model: Path) -> Policy:
    """An engine whose output head was left behind when the rest was updated."""
    changed = copy.deepcopy(policy.model)
    changed.lm_head.weight = torch.nn.Parameter(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).lm_head.weight.detach()
    )
    return replace(policy, model=changed)
