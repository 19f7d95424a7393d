"""A run's model at a real front door whose trainer computes next to nothing: what it computes
depends on all that came before."""

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.hosted.adapters.tinker_trainer import TinkerTrainer
from flotilla_learner.hosted.hosted_ranks import HostedRanks, HostedSite
from flotilla_learner.hosted.step_book import StepBook
from flotilla_learner.types import TrainBatch, TrainSequence
from flotilla_tinker.types import BaseFacts, LossBatch, LossResult
from tests.tinker.work.desk_doubles import BASE, ScriptedTrainer

VOCABULARY = 97
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"]


class ShapedTrainer(ScriptedTrainer):
    """A trainer whose scores have the shapes of their sequences."""

    async def describe_base(self) -> BaseFacts:
        return replace(await super().describe_base(), losses=LOSSES)

    async def forward_backward(self, model_id: str, number: int, batch: LossBatch) -> LossResult:
        found = await super().forward_backward(model_id, number, batch)
        seed = hashlib.sha256(found.logprobs[0].tobytes()).digest()
        rng = np.random.default_rng(int.from_bytes(seed[:4], "little"))
        logprobs = [-rng.random(each.target_ids.shape, np.float32) for each in batch.sequences]
        return LossResult(logprobs, {"loss:sum": float(rng.random())})

    @property
    def updates(self) -> int:
        """How often the optimizer was stepped."""
        return sum(call.startswith("update") for _, call in self.calls)

    def count(self, call: str) -> int:
        return sum(each.startswith(call) for _, each in self.calls)


def learner_config(**changes: Any) -> LearnerConfig:
    given = {
        "engine": "tinker",
        "tasks": "none",
        "steps": 10,
        "groups_per_step": 3,
        "group_size": 4,
        "lora": {"rank": 8},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        **changes,
    }
    return LearnerConfig.model_validate(given)


def policy_config(url: str, model: str = BASE, **tinker: Any) -> PolicyConfig:
    values = {"model": model, "dtype": "float32", "max_model_len": 64}
    return PolicyConfig.model_validate({**values, "tinker": {"url": url, **tinker}})


def open_ranks(
    run_dir: Path,
    url: str,
    config: LearnerConfig | None = None,
    note_progress: Callable[[], object] = bool,
    **tinker: Any,
) -> HostedRanks:
    """The ranks of one start of the run in `run_dir`."""
    memory = run_dir / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    policy = policy_config(url, **tinker)
    site = HostedSite("run", memory, policy, VOCABULARY)
    config = config or learner_config()
    rank = config.lora.rank if config.lora else 0
    service = TinkerTrainer(
        policy.tinker, site.base_model, rank, 7, "run", note_progress=note_progress
    )
    return HostedRanks(site, config, service, StepBook(run_dir, "run"))


@asynccontextmanager
async def started(
    run_dir: Path,
    url: str,
    checkpoint: Path | None = None,
    config: LearnerConfig | None = None,
    **options: Any,
) -> AsyncGenerator[HostedRanks]:
    """One start of the run, which ends with the block."""
    ranks = open_ranks(run_dir, url, config, **options)
    await ranks.start_ranks(checkpoint)
    try:
        yield ranks
    finally:
        await ranks.close()


def train_batch(step: int = 1, groups: int = 3, size: int = 4, longest: int = 30) -> TrainBatch:
    """Groups of random sequences with two turns each; one attempt of each group is better."""
    rng = np.random.default_rng(step)
    sequences = [
        _sequence(rng, f"g{index // size}", index % size, longest) for index in range(groups * size)
    ]
    return TrainBatch(step, tuple(sequences))


def _sequence(rng: np.random.Generator, group: str, attempt: int, longest: int) -> TrainSequence:
    length = int(rng.integers(12, longest))
    mask = np.zeros(length, np.bool_)
    mask[4:7] = True
    mask[9 : length - 2] = True
    logprobs = np.where(mask, -rng.random(length) * 4, 0).astype(np.float32)
    return TrainSequence(
        group_id=group,
        attempt_index=attempt,
        reward=float((attempt + int(group[1:])) % 3 == 0),
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        policy_mask=mask,
        behaviour_logprobs=logprobs,
        temperature=1.0,
        staleness=0,
    )
