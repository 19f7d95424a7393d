"""Whole steps against docs/algorithms.md written down a second time, in float64.

One sequence at a time, by plain autograd through the model's own forward pass: no packs, no fused
head, nothing from `algo/`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla_common.domain.attempts import StopReason
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.types import StepSettings, TrainBatch, TrainSequence
from tests.support.tiny_ranks import make_batch, make_trainer

# With so large an epsilon and no memory AdamW is gradient descent at the rate lr / EPSILON.
EPSILON = 1e4
RATE = 0.02

MASKED = (StopReason.GENERATION_LENGTH,)
DECOUPLED: dict[str, Any] = {
    "proximal": "trainer",
    "epochs": 2,
    "mini_batches": 2,
    "entropy_coefficient": 0.02,
    "kl": {"coefficient": 0.3},
    "correction": {"token_tis": 1.2, "token_mask": [0.6, 2.5], "staleness_decay": 0.7},
    "overlong": {
        "mask_stop_reasons": list(MASKED),
        "soft_limit": 30,
        "soft_buffer": 20,
        "soft_weight": 0.5,
    },
}
CRITIC: dict[str, Any] = {
    "advantage": "gae",
    "epochs": 2,
    "mini_batches": 2,
    "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"},
    "critic": {"discount": 0.97, "trace_decay": 0.9, "value_clip": 0.05},
}


@dataclass
class Reported:
    """Values fixed before the first update, by sequence; arrays [policy tokens]."""

    advantages: list[Tensor]
    returns: list[Tensor]
    values: list[Tensor]
    proximal: list[Tensor]
    reference: list[Tensor]


class Naive:
    """Two models in float64, and gradient descent on the loss in the documentation."""

    def __init__(self, model: Any, batch: TrainBatch, config: AlgorithmConfig) -> None:
        self.model = copy.deepcopy(model).double()
        self.first = copy.deepcopy(self.model)
        self.body = copy.deepcopy(self.model.base_model)
        self.value = torch.nn.Linear(self.body.config.hidden_size, 1).double()
        torch.nn.init.zeros_(self.value.weight)
        torch.nn.init.zeros_(self.value.bias)
        self.batch, self.config = batch, config

    def logprobs(self, model: Any, s: TrainSequence) -> tuple[Tensor, Tensor]:
        """Return logprobs of the policy's tokens, and the entropies there."""
        ids = torch.from_numpy(s.token_ids.astype(np.int64))
        written = torch.from_numpy(s.policy_mask[1:])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logs = (logits.double() / s.temperature).log_softmax(-1)[written]
        own = ids[1:][written]
        return logs[torch.arange(len(own)), own], -(logs.exp() * logs).sum(-1)

    def values(self, s: TrainSequence) -> Tensor:
        ids = torch.from_numpy(s.token_ids.astype(np.int64))
        states = self.body(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        written = torch.from_numpy(s.policy_mask[1:])
        return self.value(states.double()[written]).squeeze(1)

    @torch.no_grad()
    def report(self) -> Reported:
        sequences = self.batch.sequences
        proximal = [self.logprobs(self.model, s)[0] for s in sequences]
        reference = [self.logprobs(self.first, s)[0] for s in sequences]
        values = [self.values(s) for s in sequences]
        if self.config.advantage == "gae":
            rows = zip(sequences, proximal, reference, values, strict=True)
            pairs = [self.traced(*row) for row in rows]
            raw = torch.cat([pair[0] for pair in pairs])
            scale = (raw.var() + 1e-8).sqrt()
            advantages = [(pair[0] - raw.mean()) / scale for pair in pairs]
            return Reported(advantages, [pair[1] for pair in pairs], values, proximal, reference)
        numbers = self.compared()
        advantages = [torch.full((len(p),), a) for p, a in zip(proximal, numbers, strict=True)]
        return Reported(advantages, values, values, proximal, reference)

    def traced(self, s: TrainSequence, p: Tensor, r: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """GAE by its recursion, not whitened, and returns; an attempt has one sequence."""
        earned = -self.config.kl.coefficient * (p - r)
        earned[-1] += s.reward
        critic = self.config.critic
        found = torch.zeros_like(v)
        following, running = 0.0, 0.0
        for t in reversed(range(len(v))):
            delta = float(earned[t]) + critic.discount * following - float(v[t])
            running = delta + critic.discount * critic.trace_decay * running
            found[t], following = running, float(v[t])
        return found, found + v

    def compared(self) -> list[float]:
        """GRPO's advantage of each sequence's attempt."""
        overlong = self.config.overlong
        outcomes: dict[tuple[str, int], float] = {}
        lengths: dict[tuple[str, int], int] = {}
        for s in self.batch.sequences:
            key = (s.group_id, s.attempt_index)
            lengths[key] = lengths.get(key, 0) + int(s.policy_mask.sum())
        for s in self.batch.sequences:
            key, penalty = (s.group_id, s.attempt_index), 0.0
            if overlong.soft_limit is not None:
                over = lengths[key] - (overlong.soft_limit - overlong.soft_buffer)
                penalty = -overlong.soft_weight * min(1.0, max(0.0, over / overlong.soft_buffer))
            outcomes[key] = s.reward + penalty
        found: list[float] = []
        for s in self.batch.sequences:
            group = np.array([v for (g, _), v in outcomes.items() if g == s.group_id])
            own = outcomes[s.group_id, s.attempt_index]
            found.append((own - group.mean()) / (group.std(ddof=1) + 1e-6))
        return found

    def policy_loss(self, given: Reported, index: int) -> Tensor:
        """The sum over one sequence's tokens, before the reduction."""
        s, c = self.batch.sequences[index], self.config
        now, entropy = self.logprobs(self.model, s)
        sampled = torch.from_numpy(s.behaviour_logprobs[s.policy_mask]).double()
        start = given.proximal[index]
        ratio = (now - (start if c.proximal == "trainer" else sampled)).exp()
        a = given.advantages[index]
        clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
        loss = -torch.minimum(ratio * a, clipped * a)
        off = (start - sampled).exp()
        loss = loss * c.correction.staleness_decay**s.staleness
        if c.correction.token_tis is not None:
            loss = loss * off.clamp(max=c.correction.token_tis)
        if c.kl.coefficient > 0 and c.kl.place == "loss":
            d = now - given.reference[index]
            loss = loss + c.kl.coefficient * ((-d).exp() - 1 + d)
        loss = loss - c.entropy_coefficient * entropy
        for low, high in filter(None, (c.correction.token_mask, self.limit)):
            loss = torch.where((off >= low) & (off <= high), loss, 0.0)
        return loss.sum()

    @property
    def limit(self) -> tuple[float, float] | None:
        x = self.batch.settings.ratio_limit
        return None if x is None else (1 / x, x)

    def value_loss(self, given: Reported, index: int) -> Tensor:
        v, old = self.values(self.batch.sequences[index]), given.values[index]
        clip = self.config.critic.value_clip
        held = old + (v - old).clamp(-clip, clip)
        goal = given.returns[index]
        return (torch.maximum((v - goal) ** 2, (held - goal) ** 2) / 2).sum()

    def train(self, parts: Sequence[Sequence[str]]) -> None:
        """Updates of mini-batches that hold these groups."""
        given = self.report()
        for part in list(parts) * self.config.epochs:
            chosen = [
                i
                for i, s in enumerate(self.batch.sequences)
                if s.group_id in part
                and s.stop_reason not in self.config.overlong.mask_stop_reasons
            ]
            tokens = sum(int(self.batch.sequences[i].policy_mask.sum()) for i in chosen)
            loss = torch.stack([self.policy_loss(given, i) for i in chosen]).sum() / tokens
            descend(loss, self.model.parameters())
            if self.config.advantage == "gae":
                loss = torch.stack([self.value_loss(given, i) for i in chosen]).sum() / tokens
                descend(loss, [*self.body.parameters(), *self.value.parameters()])


def descend(loss: Tensor, parameters: Any) -> None:
    chosen = list(parameters)
    for parameter, slope in zip(chosen, torch.autograd.grad(loss, chosen), strict=True):
        parameter.data -= RATE * slope


def mixed(batch: TrainBatch) -> TrainBatch:
    """Stale sequences, one that was cut off, and an attempt of two sequences."""
    sequences = list(batch.sequences)
    sequences[1] = replace(sequences[1], stop_reason=MASKED[0])
    sequences[2] = replace(sequences[2], staleness=2)
    sequences[6] = replace(sequences[6], attempt_index=1, reward=sequences[5].reward)
    return replace(batch, sequences=tuple(sequences), settings=StepSettings(ratio_limit=2.0))


@pytest.mark.parametrize(
    ("algorithm", "mix"),
    [({}, True), (DECOUPLED, True), (CRITIC, False)],
    ids=["default", "decoupled", "critic"],
)
def test_a_step_is_what_the_page_says(
    model_folder: Path, algorithm: dict[str, Any], mix: bool
) -> None:
    config = AlgorithmConfig.model_validate(algorithm)
    # Out of bounds, like eps: not validated.
    critic = config.critic.model_copy(update={"lr": RATE * EPSILON})
    config = config.model_copy(update={"critic": critic})
    policy, _, trainer = make_trainer(
        model_folder, algorithm=config, eps=EPSILON, betas=(0.0, 0.0), grad_clip=0.0
    )
    batch = make_batch(policy, groups=4, size=3, shift=0.4)
    batch = mixed(batch) if mix else batch
    naive = Naive(policy.model, batch, config)
    before = {name: p.detach().clone() for name, p in policy.named_parameters().items()}
    trainer.train_step(batch, lr=RATE * EPSILON)
    halves = [["g0", "g1"], ["g2", "g3"]]
    naive.train(halves if config.mini_batches == 2 else [halves[0] + halves[1]])
    moved = 0.0
    for name, expected in naive.model.named_parameters():
        own = policy.named_parameters()[name].detach()
        moved = max(moved, float((own - before[name]).abs().max()))
        torch.testing.assert_close(own.double(), expected.detach(), rtol=0, atol=1e-6)
    assert moved > 1e-3
    if trainer.critic is not None:
        own = trainer.critic.named_parameters()
        body = {f"body.{name}": p for name, p in naive.body.named_parameters()}
        head = {f"head.{name}": p for name, p in naive.value.named_parameters()}
        for name, expected in {**body, **head}.items():
            torch.testing.assert_close(
                own[name].detach().double(), expected.detach(), rtol=0, atol=1e-6
            )
