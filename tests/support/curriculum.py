"""A run from the curriculum's view: draws, outcomes, a journal, and kills."""

import hashlib
from collections.abc import Sequence
from typing import Any

from flotilla_common.spec.config import parse_config
from flotilla_learner.config.sampling import SamplingConfig
from flotilla_learner.sampling.curriculum import Curriculum
from flotilla_learner.sampling.curriculum_changes import (
    CurriculumChange,
    StoredCurriculum,
    TaskState,
)
from flotilla_learner.sampling.group_signal import GroupOutcome
from flotilla_learner.sampling.tasks import Task


def config(**values: Any) -> SamplingConfig:
    return parse_config(SamplingConfig, values, where="test")


def tasks_of(**sizes: int) -> list[Task]:
    return [Task(f"{env}{n}", env, "{}") for env, size in sizes.items() for n in range(size)]


class Run:
    """Draws a window, then learns from it; `journal` is what a restart reads."""

    def __init__(
        self, tasks: Sequence[Task], sampling: SamplingConfig, *, seed: int, window: int
    ) -> None:
        self.tasks = tasks
        self.sampling = sampling
        self.seed = seed
        self.window = window
        self.journal = StoredCurriculum()
        self.changes: list[CurriculumChange] = []
        self.drawn: list[str] = []
        self.step = 0
        self.curriculum = self._started()

    def kill(self) -> None:
        """Keep only the journal and the leased groups."""
        self.curriculum = self._started()
        self.curriculum.catch_up(len(self.drawn))

    def draw(self) -> Task:
        task = self.curriculum.draw_task()
        self.drawn.append(task.key)
        return task

    def learn(self, outcomes: Sequence[GroupOutcome]) -> CurriculumChange:
        self.step += 1
        change = self.curriculum.learn_from_outcomes(self.step, outcomes)
        self.commit(change)
        return change

    def commit(self, change: CurriculumChange) -> None:
        self.changes.append(change)
        known: dict[str, TaskState] = {state.task: state for state in self.journal.tasks}
        known.update({state.task: state for state in change.tasks})
        self.journal = StoredCurriculum(change.number, change.cursors, tuple(known.values()))

    def _started(self) -> Curriculum:
        return Curriculum(
            self.tasks, self.sampling, seed=self.seed, window=self.window, stored=self.journal
        )


def made_up(task: Task, number: int) -> GroupOutcome:
    """Rewards of four attempts, always the same for a task at a sequence number: a third of the
    tasks is mostly solved, a third mostly failed."""
    digest = hashlib.sha256(f"{task.key}/{number}".encode()).digest()
    kind = hashlib.sha256(task.key.encode()).digest()[0] % 3
    chance = (12, 128, 244)[kind]
    return GroupOutcome(task.key, [float(byte < chance) for byte in digest[:4]])
