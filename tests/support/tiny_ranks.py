"""Tiny random models and batches for the rank's tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import StepResult, TrainBatch, TrainSequence
from tests.support.rank_configs import policy_config

VOCAB = 97
YARN: dict[str, str | int | float] = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}


SMALL_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_SIZES: dict[str, Any] = {
    **SMALL_SIZES,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def write_model(folder: Path, *, tied: bool = True) -> Path:
    """A random Qwen3 of 2 layers as a Hugging Face folder; its outputs are far from uniform."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=tied)).save_pretrained(folder)
    return folder


def write_sparse_model(folder: Path) -> Path:
    """The same with experts in both layers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(
    policy: Policy | None = None,
    *,
    step: int = 1,
    groups: int = 3,
    size: int = 4,
    shift: float = 0.0,
) -> TrainBatch:
    """Groups of random sequences of 12 to 40 tokens with two policy turns each.

    Behaviour logprobs are the policy's own (uniform without one) plus noise of size `shift`.
    """
    rng = np.random.default_rng(step)
    sequences = [
        _sequence(policy, rng, f"g{index // size}", index % size, shift)
        for index in range(groups * size)
    ]
    return TrainBatch(step, tuple(sequences))


def _sequence(
    policy: Policy | None, rng: np.random.Generator, group: str, attempt: int, shift: float
) -> TrainSequence:
    length = int(rng.integers(12, 40))
    token_ids = rng.integers(0, VOCAB, length).astype(np.int32)
    mask = np.zeros(length, np.bool_)
    mask[4:7] = True
    mask[9 : length - 2] = True
    temperature = 0.8
    logprobs = np.full(length, -np.log(VOCAB), np.float32)
    if policy is not None:
        logprobs[1:] = reference_logprobs(policy, token_ids, temperature)
    logprobs += rng.normal(0, 1, length).astype(np.float32) * shift
    return TrainSequence(
        group_id=group,
        attempt_index=attempt,
        reward=float((attempt + int(group[1:])) % 3 == 0),
        token_ids=token_ids,
        policy_mask=mask,
        behaviour_logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        temperature=temperature,
        staleness=0,
    )


def make_prompted_batch(
    *, step: int = 1, groups: int = 3, size: int = 4, prompt: int = 24
) -> TrainBatch:
    """Like `make_batch`, but the sequences begin with their group's prompt."""
    rng = np.random.default_rng(step)
    tails = make_batch(step=step, groups=groups, size=size, shift=0.1)
    prompts = rng.integers(0, VOCAB, (groups, prompt)).astype(np.int32)
    none = np.zeros(prompt, np.float32)
    sequences = [
        replace(
            tail,
            # Of its own only from the first policy token on.
            token_ids=np.concatenate([prompts[index // size], tail.token_ids[4:]]),
            policy_mask=np.concatenate([none[4:] > 0, tail.policy_mask]),
            behaviour_logprobs=np.concatenate([none[4:], tail.behaviour_logprobs]),
        )
        for index, tail in enumerate(tails.sequences)
    ]
    return TrainBatch(step, tuple(sequences))


@torch.no_grad()
def reference_logprobs(policy: Policy, token_ids: np.ndarray, temperature: float) -> np.ndarray:
    """Return logprobs of tokens 1..n-1, by the model's own forward pass and a plain log_softmax."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    values = (logits.float() / temperature).log_softmax(-1)
    return values.gather(1, ids[1:, None]).squeeze(1).numpy()


def make_trainer(
    folder: Path,
    *,
    pack_tokens: int = 256,
    head_chunk: int = 16,
    algorithm: AlgorithmConfig | None = None,
    checkpointing: Literal["auto", "off", "selective", "full"] = "auto",
    offload: bool = False,
    replicas: Replicas | None = None,
    lora: LoraConfig | None = None,
    dtype: str = "float32",
    adapter_rank: int | None = None,
    **optimizer: object,
) -> tuple[Policy, Optimizer, Trainer]:
    rank = RankConfig(
        pack_tokens=pack_tokens, head_chunk=head_chunk, gradient_checkpointing=checkpointing
    )
    chosen_policy = policy_config(folder, dtype=dtype, adapter_rank=adapter_rank)
    policy = load_policy(chosen_policy, rank, lora=lora)
    # Not validated: where eps is far out of bounds, an update is a multiple of the gradient.
    settings = OptimizerConfig(lr=1e-2).model_copy(update=optimizer)
    adamw = Optimizer(policy.trained_parameters(), settings, offload=offload)
    chosen = algorithm or AlgorithmConfig()
    return policy, adamw, Trainer(policy, adamw, chosen, rank, replicas=replicas)


@dataclass(frozen=True)
class Step:
    """A trained policy, and the result of its last step."""

    policy: Policy
    result: StepResult

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.result.metrics

    def gain(self, before: Policy, sequences: Sequence[TrainSequence]) -> float:
        """Return the total increase of the sequences' log-likelihood."""
        return sum(gain(self.policy, before, sequence) for sequence in sequences)


def train(
    folder: Path,
    batch: TrainBatch,
    *,
    lr: float = 1e-3,
    steps: int = 1,
    **algorithm: object,
) -> Step:
    """Train a fresh policy for `steps` steps on the same batch."""
    config = AlgorithmConfig.model_validate(algorithm)
    policy, _, trainer = make_trainer(folder, algorithm=config)
    for step in range(1, steps):
        trainer.train_step(replace(batch, step=step), lr)
    return Step(policy, trainer.train_step(replace(batch, step=steps), lr))


def only(key: str, value: object) -> dict[str, Any]:
    """One key of an algorithm whose name is a variable."""
    return {key: value}


def changed(batch: TrainBatch, **values: object) -> TrainBatch:
    """Return the batch with some fields of every sequence replaced."""
    return replace(batch, sequences=tuple(replace(s, **values) for s in batch.sequences))  # pyright: ignore[reportArgumentType]


def gain(after: Policy, before: Policy, sequence: TrainSequence) -> float:
    """Return the increase of the logprobs of the sequence's policy tokens."""
    found = [
        reference_logprobs(policy, sequence.token_ids, sequence.temperature)
        for policy in (after, before)
    ]
    return float((found[0] - found[1])[sequence.policy_mask[1:]].sum())


def parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.named_parameters().items()}


def trained_parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy.trained_parameters().items()}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
