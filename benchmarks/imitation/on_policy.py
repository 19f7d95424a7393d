"""Training on a policy's own samples, by GRPO or by distillation, and what it learns by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.algorithms.run import OPTIMIZER, Sampler, make_trainer, train_batch
from benchmarks.imitation.teacher import Teacher
from flotilla_learner.config.algorithm import AlgorithmConfig, DistillationConfig
from flotilla_learner.rank.learning_rate import learning_rate
from flotilla_learner.rank.model import Policy
from flotilla_reading.plots.curve_plot import Panel, PlotLine, draw_panels


class Point(NamedTuple):
    """Held-out tasks solved at T = 1, after so many tokens were sampled for training."""

    tokens: int
    solved: int


Curve = Sequence[Point]


@dataclass(frozen=True)
class Course:
    """Optimizer steps of a run, the groups that each samples, and its held-out tasks of each
    environment, which are played before the first step and after every `every` steps."""

    steps: int
    groups: int
    heldout_tasks: int
    every: int


def train_on_samples(
    policy: Policy, sampler: Sampler, course: Course, teacher: Teacher | None
) -> list[Point]:
    """Make the steps of a course: of GRPO, or of distillation from the teacher."""
    alone = AlgorithmConfig(distillation=DistillationConfig(alone=True))
    trainer = make_trainer(policy, alone if teacher else AlgorithmConfig())
    tokens, curve = 0, [Point(0, sampler.score(tasks_per_env=course.heldout_tasks).solved)]
    for step in range(1, course.steps + 1):
        batch = train_batch(step, sampler.sample(step - 1, course.groups))
        batch = teacher.teach(batch) if teacher else batch
        trainer.train_step(batch, learning_rate(OPTIMIZER, step, course.steps))
        sampler.adopt(policy)
        tokens += sum(int(sequence.policy_mask.sum()) for sequence in batch.sequences)
        if step % course.every == 0:
            solved = sampler.score(tasks_per_env=course.heldout_tasks).solved
            curve.append(Point(tokens, solved))
    return curve


def draw_curves(out: Path, curves: Mapping[str, Sequence[Curve]], tasks: int) -> None:
    """Draw the share of held-out tasks solved by tokens sampled: a line for each seed, those of one
    name in one colour."""
    lines = [
        PlotLine(
            f"{name}, seed {seed}",
            [point.tokens for point in curve],
            [point.solved / tasks for point in curve],
            style=("-", "--", ":")[seed % 3],
            color=f"C{number}",
        )
        for number, (name, seeds) in enumerate(curves.items())
        for seed, curve in enumerate(seeds)
    ]
    label = "tokens sampled for training"
    draw_panels(out, [Panel("held-out pass@1", lines, xlabel=label)])
