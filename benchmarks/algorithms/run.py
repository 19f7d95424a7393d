"""One training run in this process: the project's losses and environments without its services."""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.algorithms.cases import Case
from flotilla_common.domain.attempts import StopReason
from flotilla_common.spec.spec import PolicyConfig
from flotilla_environments.api import ENV_KEYS
from flotilla_environments.task_generator import Scenario, draw_scenario, make_data_id
from flotilla_environments.tiny_policy.episodes import PlayedEpisode, Player, play_tasks
from flotilla_environments.tiny_policy.evaluate import Score, load_player
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.learning_rate import learning_rate
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch, TrainSequence

# The demo's settings (deploy/runs/local.toml).
GROUPS, GROUP_SIZE, TRAIN_TASKS = 12, 8, 1200
OPTIMIZER = OptimizerConfig(lr=2e-3, betas=(0.9, 0.95), warmup_steps=3)
EVAL_TASKS_PER_ENV = 64


@dataclass(frozen=True)
class Plan:
    """Length of a run and its evaluations: after its last steps, `evals` times."""

    steps: int = 50
    evals: int = 3
    every: int = 5

    @property
    def evaluated(self) -> frozenset[int]:
        return frozenset(self.steps - self.every * back for back in range(self.evals))


@dataclass(frozen=True)
class Sampled:
    """Batch with the version that sampled it."""

    version: int
    episodes: list[PlayedEpisode]


def run_case(case: Case, seed: int, plan: Plan, folder: Path) -> float:
    """Mean of a run's evaluations."""
    scores = train_case(case, seed, plan, folder)
    return sum(scores) / len(scores)


def train_case(case: Case, seed: int, plan: Plan, folder: Path) -> list[float]:
    """Return pass@1 at T = 1 on the held-out tasks at each evaluation."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = open_policy(folder)
    trainer = make_trainer(policy, case.algorithm)
    sampler = Sampler(folder, seed)
    waiting = deque(sampler.sample(0) for _ in range(case.staleness + 1))
    scores: list[float] = []
    for step in range(1, plan.steps + 1):
        batch = train_batch(step, waiting.popleft())
        trainer.train_step(batch, learning_rate(OPTIMIZER, step, plan.steps))
        sampler.adopt(policy)
        if step in plan.evaluated:
            scores.append(sampler.score().pass_at_1)
        waiting.append(sampler.sample(step))
    return scores


def open_policy(folder: Path) -> Policy:
    """Load the policy to train."""
    config = PolicyConfig(model=str(folder), dtype="float32", max_model_len=512)
    return load_policy(config, RankConfig())


def make_trainer(policy: Policy, algorithm: AlgorithmConfig) -> Trainer:
    """Return a trainer whose optimizer starts fresh."""
    optimizer = Optimizer(policy.named_parameters(), OPTIMIZER)
    # No metric of a step is read, so none is measured after it.
    return Trainer(policy, optimizer, algorithm, RankConfig(post_update_tokens=0))


class Sampler:
    """Acting policy with its own weights, and the environments whose tasks it plays."""

    def __init__(self, folder: Path, seed: int, env_keys: Sequence[str] = ENV_KEYS) -> None:
        self._player: Player = load_player(folder)
        self._env_keys = env_keys
        self._tasks = _task_order(seed, env_keys)
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def adopt(self, policy: Policy) -> None:
        """Load these parameters."""
        trained = policy.named_parameters()
        for name, parameter in self._player.model.named_parameters():
            parameter.copy_(trained[name])

    def sample(self, version: int, groups: int = GROUPS) -> Sampled:
        """Play attempts at the next tasks, those of one task adjacent."""
        tasks = [next(self._tasks) for _ in range(groups)]
        attempts = [task for task in tasks for _ in range(GROUP_SIZE)]
        played = play_tasks(self._player, attempts, temperature=1.0, generator=self._generator)
        return Sampled(version, played)

    def score(self, *, tasks_per_env: int = EVAL_TASKS_PER_ENV, temperature: float = 1.0) -> Score:
        """Return the score on the held-out tasks, with the same random numbers every time."""
        drawn = [
            draw_scenario(env_key, make_data_id("heldout", index))
            for index in range(tasks_per_env)
            for env_key in self._env_keys
        ]
        generator = torch.Generator().manual_seed(0)
        played = play_tasks(self._player, drawn, temperature=temperature, generator=generator)
        return Score(sum(episode.solved for episode in played), len(played))


def train_batch(step: int, sampled: Sampled) -> TrainBatch:
    """Make the batch that the learner would make of these episodes."""
    staleness = step - 1 - sampled.version
    sequences = [
        _train_sequence(episode, f"g{step}-{index // GROUP_SIZE}", index % GROUP_SIZE, staleness)
        for index, episode in enumerate(sampled.episodes)
    ]
    return TrainBatch(step, tuple(sequences))


def _train_sequence(
    episode: PlayedEpisode, group_id: str, attempt: int, staleness: int
) -> TrainSequence:
    return TrainSequence(
        group_id=group_id,
        attempt_index=attempt,
        reward=float(episode.solved),
        token_ids=np.array(episode.ids, np.int32),
        policy_mask=np.array(episode.policy, np.bool_),
        behaviour_logprobs=np.array(episode.logprobs, np.float32),
        temperature=1.0,
        staleness=staleness,
        stop_reason=StopReason(episode.stop_reason or StopReason.MAX_TURNS),
    )


def _task_order(seed: int, env_keys: Sequence[str]) -> Iterator[Scenario]:
    """Yield tasks endlessly, environments in turn, in an order that depends on the seed."""
    rng = random.Random(seed)
    while True:
        for index in rng.sample(range(TRAIN_TASKS), TRAIN_TASKS):
            for env_key in env_keys:
                yield draw_scenario(env_key, make_data_id("train", index))
