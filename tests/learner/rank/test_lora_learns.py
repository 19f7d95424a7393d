"""GRPO with adapters raises the reward of the smallest task: sample tokens of one kind."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flotilla_learner.algo.logprob_head import token_logprobs
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.types import TrainBatch, TrainSequence
from tests.support.tiny_ranks import VOCAB, make_trainer, parameters, same_bits

GROUPS, SIZE, PROMPT, ANSWER = 4, 8, 4, 6


@pytest.mark.slow
def test_the_reward_rises_and_the_model_stays(model_folder: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8)
    policy, _, trainer = make_trainer(model_folder, lora=lora)
    base, rng = parameters(policy), np.random.default_rng(0)
    rewards: list[float] = []
    for step in range(1, 41):
        batch = play(policy, step, rng)
        rewards.append(float(np.mean([sequence.reward for sequence in batch.sequences])))
        result = trainer.train_step(batch, lr=1e-2)
        # What was sampled is what the trainer scores: the weights are the same.
        assert result.metrics["mismatch/logprob_abs_diff_mean"] < 1e-4
    assert np.mean(rewards[:5]) < 0.65
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.25
    assert same_bits(parameters(policy), base)


@torch.no_grad()
def play(policy: Policy, step: int, rng: np.random.Generator) -> TrainBatch:
    """Sample answers to random prompts; the reward is the share of tokens that are even."""
    prompts = rng.integers(0, VOCAB, (GROUPS, PROMPT)).repeat(SIZE, axis=0)
    rows = [row.astype(np.int32) for row in prompts]
    logprobs = np.zeros((len(rows), ANSWER), np.float32)
    for place in range(ANSWER):
        ends = np.cumsum([len(row) for row in rows]) - 1
        hidden = policy.hidden_states(rows)[torch.from_numpy(ends)]
        chances = (hidden @ policy.head.t()).double().softmax(-1).numpy()
        drawn = np.array([rng.choice(VOCAB, p=chance / chance.sum()) for chance in chances])
        ones = torch.ones(len(rows))
        found = token_logprobs(hidden, policy.head, torch.from_numpy(drawn), ones, chunk=64)
        logprobs[:, place] = found.numpy()
        rows = [
            np.append(row, token).astype(np.int32) for row, token in zip(rows, drawn, strict=True)
        ]
    return TrainBatch(
        step,
        tuple(sequence_of(i, r, p) for i, (r, p) in enumerate(zip(rows, logprobs, strict=True))),
    )


def sequence_of(index: int, row: np.ndarray, logprobs: np.ndarray) -> TrainSequence:
    mask = np.arange(len(row)) >= PROMPT
    return TrainSequence(
        group_id=f"g{index // SIZE}",
        attempt_index=index % SIZE,
        reward=float(np.mean(row[PROMPT:] % 2 == 0)),
        token_ids=row,
        policy_mask=mask,
        behaviour_logprobs=np.concatenate([np.zeros(PROMPT), logprobs]).astype(np.float32),
        temperature=1.0,
        staleness=0,
    )
