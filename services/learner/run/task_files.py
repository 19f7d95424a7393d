"""Training and evaluation tasks, from the files and the selection of a run's spec."""

from pathlib import Path

from services.common.errors import ConfigError
from services.common.log import get_logger
from services.learner.config.learner import EvalSetConfig, LearnerConfig
from services.learner.run.eval_report import EvalSet
from services.learner.sampling.task_filter import TaskFilterError, filter_eval_tasks, filter_tasks
from services.learner.sampling.tasks import Task, TaskFileError, load_tasks

_log = get_logger(__name__)


def load_task_files(config: LearnerConfig, seed: int) -> tuple[list[Task], list[EvalSet]]:
    """Load training tasks and evaluation sets. Raises ConfigError."""
    try:
        loaded = load_tasks(Path(config.tasks))
        tasks = filter_tasks(loaded, config.select, path=config.tasks, seed=seed)
        sets = [_load_eval_set(config, chosen) for chosen in config.eval.sets]
    except (TaskFileError, TaskFilterError) as error:
        raise ConfigError(str(error)) from error
    if len(tasks) < len(loaded):
        _log.info("tasks selected", path=config.tasks, tasks=len(tasks), of=len(loaded))
    return tasks, sets


def _load_eval_set(config: LearnerConfig, chosen: EvalSetConfig) -> EvalSet:
    tasks = filter_eval_tasks(load_tasks(Path(chosen.tasks)), config.select, path=chosen.tasks)
    return EvalSet(chosen, tuple(tasks[: chosen.count]))
