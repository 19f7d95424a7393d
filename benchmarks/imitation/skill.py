"""A skill that demonstrations show badly: the shop's orders, which take three calls.

The start policy imitated a demonstrator who looks up customer and item, and never orders, so it
solves almost nothing. It then gets a few episodes of a clumsy demonstrator, or orders by itself and
learns from what the verifier says, or both."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.algorithms.run import (
    OPTIMIZER,
    Sampler,
    make_trainer,
    open_policy,
)
from benchmarks.imitation.on_policy import Course, Point, train_on_samples
from benchmarks.imitation.teacher import Teacher
from flotilla_environments.api import open_instance
from flotilla_environments.task_generator import make_data_id
from flotilla_environments.tiny_policy.build import Recipe, recipe_for
from flotilla_environments.tiny_policy.demonstrations import (
    Demonstration,
    make_assignment,
    tokenize_episode,
)
from flotilla_environments.tiny_policy.demonstrator import Habits, demonstrate
from flotilla_environments.tiny_policy.episodes import is_solved
from flotilla_environments.tiny_policy.tokenizer import DONE
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.imitation.step_schedule import StepSchedule
from flotilla_learner.rank.learning_rate import learning_rate
from flotilla_learner.rank.model import Policy
from flotilla_learner.types import TrainBatch, TrainSequence
from flotilla_rollout.adapters.tokenizer import load_tokenizer
from flotilla_rollout.dialects.template import TemplateDialect

SKILL = "shop"
START = Habits(lazy={"booking": 0.5, "tracker": 0.5, SKILL: 1.0})
CLUMSY = Habits(lazy={SKILL: 0.4}, sloppy=0.1)
EPISODES, SEQUENCES_PER_STEP = 256, 32
STEPS, FIRST_STEPS, GROUPS = 60, 40, 4
HELDOUT_TASKS, CURVE_STEPS = 128, 10


@dataclass(frozen=True)
class Arm:
    """A row: optimizer steps of imitation, then on the policy's own samples, with a fresh optimizer
    for each."""

    name: str
    imitated: int = 0
    sampled: int = 0
    # Imitates the demonstrator's failures too.
    failures: bool = False
    # The row whose last policy, of the same seed, is distilled from; empty: GRPO.
    teacher: str = ""


BOTH = "SFT on the solved ones, then GRPO"
ARMS = (
    Arm("the start"),
    Arm("SFT on all episodes", imitated=STEPS, failures=True),
    Arm("SFT on the solved ones", imitated=STEPS),
    Arm("SFT on the solved ones, shorter", imitated=FIRST_STEPS),
    Arm("GRPO", sampled=STEPS),
    Arm(BOTH, imitated=FIRST_STEPS, sampled=STEPS - FIRST_STEPS),
    Arm("on-policy distillation of the latter", sampled=STEPS, teacher=BOTH),
)


@dataclass(frozen=True)
class Outcome:
    """What a run's last policy solves of the held-out tasks greedily, how many of the
    demonstrator's episodes solved theirs, and its curve, whose last point is the last policy."""

    greedy: int
    shown: int
    curve: list[Point]


def start_recipe() -> Recipe:
    """Return the recipe of the start policy."""
    return replace(recipe_for("tools", seed=0), habits=START)


def run_arm(arm: Arm, seed: int, folder: Path) -> Outcome:
    """Train the start policy of `folder`, score what it has become, and keep it there."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    episodes = record_episodes(folder, seed)
    solved = [episode for episode in episodes if episode.reward]
    policy = open_policy(folder)
    imitate(policy, episodes if arm.failures else solved, arm.imitated, seed)
    sampler = Sampler(folder, seed, (SKILL,))
    sampler.adopt(policy)
    teacher = Teacher(folder, folder / f"{arm.teacher}-{seed}.pt") if arm.teacher else None
    course = Course(arm.sampled, GROUPS, HELDOUT_TASKS, CURVE_STEPS)
    curve = train_on_samples(policy, sampler, course, teacher)
    torch.save(policy.named_parameters(), folder / f"{arm.name}-{seed}.pt")
    greedy = sampler.score(tasks_per_env=HELDOUT_TASKS, temperature=0.0).solved
    return Outcome(greedy, len(solved), curve)


def record_episodes(folder: Path, seed: int) -> list[TrainSequence]:
    """Return the clumsy demonstrator's episodes, at training tasks, as the learner would."""
    tokenizer = load_tokenizer(folder)
    dialect = TemplateDialect(tokenizer, finish="done")
    rng = random.Random(f"clumsy/{seed}")
    recorded: list[TrainSequence] = []
    for index in range(seed * EPISODES, (seed + 1) * EPISODES):
        instance = open_instance(SKILL, make_data_id("train", index))
        assignment = make_assignment(instance)
        turns = demonstrate(assignment, instance.call, CLUMSY, rng)
        solved = turns[-1].text == DONE and is_solved(instance)
        instance.close()
        shown = Demonstration(instance.scenario, assignment.tools, turns)
        example = tokenize_episode(shown, dialect, tokenizer)
        recorded.append(
            TrainSequence(
                group_id=instance.data_id,
                attempt_index=0,
                reward=float(solved),
                token_ids=np.array(example.ids, np.int32),
                policy_mask=np.array(example.policy, np.bool_),
                behaviour_logprobs=np.zeros(len(example.ids), np.float32),
                temperature=1.0,
                staleness=0,
            )
        )
    return recorded


def imitate(policy: Policy, episodes: list[TrainSequence], steps: int, seed: int) -> None:
    """Make so many optimizer steps of supervised fine-tuning."""
    trainer = make_trainer(policy, AlgorithmConfig())
    schedule = StepSchedule(len(episodes), SEQUENCES_PER_STEP, seed)
    for step in range(1, steps + 1):
        chosen = tuple(episodes[place] for place in schedule.places_of(step))
        batch = TrainBatch(step, chosen, imitated=True)
        trainer.train_step(batch, learning_rate(OPTIMIZER, step, steps))
