"""Training and evaluation tasks, from the files and the selection of a run's spec."""

from pathlib import Path

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.tasks.task_files import TaskFileError
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.sampling.eval_sets import (
    EvalSet,
    TrainedOnError,
    load_eval_set,
    refuse_trained_tasks,
)
from flotilla_learner.sampling.prepared_tasks import check_prepared
from flotilla_learner.sampling.task_filter import (
    TaskFilterError,
    UncheckedTasksError,
    filter_tasks,
)
from flotilla_learner.sampling.tasks import (
    Task,
    UnseenPicturesError,
    load_tasks,
    refuse_unseen_pictures,
)

_log = get_logger(__name__)
_REFUSALS = (
    TaskFileError,
    TaskFilterError,
    TrainedOnError,
    UncheckedTasksError,
    UnseenPicturesError,
)


def load_task_files(
    config: LearnerConfig, seed: int, *, sees_pictures: bool
) -> tuple[list[Task], list[EvalSet]]:
    """Load training tasks, none if the run imitates, and the evaluation sets that have tasks.

    Raises ConfigError, also for tasks that need images unless the policy `sees_pictures`."""
    loaded: list[Task] = []
    tasks: list[Task] = []
    try:
        if config.data:
            check_prepared(config.data, config.tasks, [each.tasks for each in config.eval.sets])
        if config.objective == "rl":
            loaded = load_tasks(Path(config.tasks))
            tasks = filter_tasks(loaded, config.select, path=config.tasks, seed=seed)
        sets = [load_eval_set(chosen, config.select) for chosen in config.eval.sets]
        if config.mode == "train":
            refuse_trained_tasks(tasks, sets)
        if not sees_pictures:
            refuse_unseen_pictures(tasks, config.tasks)
            for each in sets:
                refuse_unseen_pictures(each.tasks, each.config.tasks)
    except _REFUSALS as error:
        raise ConfigError(str(error)) from error
    if len(tasks) < len(loaded):
        _log.info("tasks selected", path=config.tasks, tasks=len(tasks), of=len(loaded))
    for chosen in sets:
        _report_set(chosen)
    return tasks, [chosen for chosen in sets if chosen.tasks]


def _report_set(chosen: EvalSet) -> None:
    name = chosen.config.name
    if chosen.why_empty:
        _log.warning("an evaluation set is left out", set=name, why=chosen.why_empty)
        return
    _log.info("evaluation set", set=name, tasks=len(chosen.tasks), by_env=dict(chosen.by_env))
    if chosen.thin:
        _log.warning(
            "learner.eval.sets: count leaves few tasks of some environments; raise it",
            set=name,
            count=chosen.config.count,
            environments=chosen.thin,
        )
