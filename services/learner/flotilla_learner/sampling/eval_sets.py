"""Evaluation sets: the tasks of each, chosen from its file."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.domain.even_spread import spread_evenly
from flotilla_common.tasks.task_digests import question_digest
from flotilla_common.tasks.task_format import parse_task
from flotilla_learner.config.learner import EvalSetConfig
from flotilla_learner.config.sampling import SelectConfig
from flotilla_learner.sampling.task_filter import TaskFilterError, apply_filters
from flotilla_learner.sampling.tasks import Task, load_tasks

# An environment's figures from fewer tasks say little.
LEAST_PER_ENV = 4
# Most tasks that an error message names.
_SHOWN = 3


class TrainedOnError(ValueError):
    """An evaluation set has tasks that the run trains on; the message has their number."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A configured set with its tasks loaded; `why_empty` explains a set without tasks."""

    config: EvalSetConfig
    tasks: tuple[Task, ...]
    why_empty: str = ""

    @property
    def by_env(self) -> Mapping[str, int]:
        """Number of tasks of each environment."""
        return dict(sorted(Counter(task.env_key for task in self.tasks).items()))

    @property
    def thin(self) -> Sequence[str]:
        """The environments of which `count` leaves fewer than LEAST_PER_ENV tasks."""
        if self.config.count is None or len(self.tasks) < self.config.count:
            return []
        return [env for env, count in self.by_env.items() if count < LEAST_PER_ENV]


def load_eval_set(config: EvalSetConfig, select: SelectConfig) -> EvalSet:
    """Load the tasks of a set: those that `select` leaves, `count` of them spread evenly over
    environments. There may be none: a selected environment may have no held-out tasks.

    Raises TaskFileError and UncheckedTasksError."""
    loaded = load_tasks(Path(config.tasks), may_be_empty=True)
    if not loaded:
        return EvalSet(config, (), f"{config.tasks} has no tasks")
    try:
        left = apply_filters(loaded, select, path=config.tasks)
    except TaskFilterError as error:
        return EvalSet(config, (), str(error))
    chosen = spread_evenly(
        left, config.count, group_of=lambda task: task.env_key, key_of=lambda task: task.key
    )
    return EvalSet(config, tuple(chosen))


def refuse_trained_tasks(trained: Collection[Task], sets: Sequence[EvalSet]) -> None:
    """Raise TrainedOnError if a set shares tasks with training, by key or by what the task is: its
    results would not be those of held-out tasks."""
    if not any(chosen.tasks for chosen in sets):
        return
    keys = {task.key for task in trained}
    asked = {_question_of(task): task.key for task in trained}
    for chosen in sets:
        # Of each task that is trained on, the key under which it is.
        twins = {
            task.key: task.key if task.key in keys else asked[_question_of(task)]
            for task in chosen.tasks
            if task.key in keys or _question_of(task) in asked
        }
        if twins:
            raise TrainedOnError(
                f"learner.eval.sets: {len(twins)} of the {len(chosen.tasks)} tasks of the set"
                f" {chosen.config.name!r} ({chosen.config.tasks}) are also trained on"
                f"{_name_twins(twins)}; evaluate tasks that are not in learner.tasks"
            )


def _question_of(task: Task) -> str:
    return question_digest(parse_task(task.json))


def _name_twins(twins: Mapping[str, str]) -> str:
    """Name some tasks that are trained on under another key."""
    others = [f"{key} as {twin}" for key, twin in twins.items() if key != twin]
    if not others:
        return ""
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return f", {len(others)} under another key ({', '.join(others[:_SHOWN])}{more})"
