"""Filter of a file's tasks for a run: `[learner.select]`. `curriculum.py` draws from the result.

Filters look at one task each, so they leave the same tasks whatever else is in the file. The
final `max_tasks` are those with the lowest hashes of seed and key: the order of the file does not
matter, and an added task replaces at most one other."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flotilla_common.spec.config import did_you_mean
from flotilla_common.tasks.task_checks import CheckFileError, Outcome, TaskCheck, read_checks
from flotilla_common.tasks.task_digests import task_digest
from flotilla_common.tasks.task_format import parse_task
from flotilla_learner.config.sampling import SelectConfig
from flotilla_learner.sampling.tasks import Task, modality_of

# Most values that an error message lists.
_SHOWN = 12


class TaskFilterError(ValueError):
    """`[learner.select]` names a value missing from the task file; the message lists its values."""


class UncheckedTasksError(ValueError):
    """`learner.select.checked` is set, and tasks have no result; the message names the command."""


@dataclass(frozen=True, slots=True)
class _Filter:
    """One key of the section: the requested values, and a reader of a task's."""

    key: str
    wanted: Sequence[str]
    value_of: Callable[[Task], str]
    # Appended to the error if it leaves nothing.
    hint: str = ""


def filter_tasks(
    tasks: Sequence[Task], config: SelectConfig, *, path: str, seed: int
) -> list[Task]:
    """Return the training tasks of the file `path`, in its order. Raises TaskFilterError and
    UncheckedTasksError."""
    _check_environments(tasks, config, path)
    _check_tools(tasks, config, path)
    left = apply_filters(tasks, config, path=path)
    if config.max_tasks is None or len(left) <= config.max_tasks:
        return left
    chosen = {task.key for task in sorted(left, key=_selection_hash(seed))[: config.max_tasks]}
    return [task for task in left if task.key in chosen]


def apply_filters(tasks: Sequence[Task], config: SelectConfig, *, path: str) -> list[Task]:
    """Return all tasks of the file `path` that pass, each with the tools on offer.

    Raises TaskFilterError if none does, and UncheckedTasksError if it is unknown of some."""
    left = list(tasks)
    details: list[str] = []
    for each in _active_filters(config):
        before, left = left, [task for task in left if each.value_of(task) in each.wanted]
        details.append(f"  {each.key} = {', '.join(each.wanted)}: {len(left)} of {len(before)}")
        if not left:
            details[-1] += f"; these have {_format_values(each, before)}{each.hint}"
            raise TaskFilterError(
                "\n".join(
                    [f"learner.select leaves none of the {len(tasks)} tasks of {path}", *details]
                )
            )
    if config.checks:
        left = _keep_valid(left, config.checks, path)
    return [_offer_tools(task, config) for task in left]


def _keep_valid(tasks: Sequence[Task], checks: str, path: str) -> list[Task]:
    """Return the tasks that a file of results calls valid, as they are now."""
    command = f"`flotilla data check SPEC {path} --out {checks}`"
    try:
        known = read_checks(Path(checks))
    except CheckFileError as error:
        raise UncheckedTasksError(f"learner.select.checks: {error}; make it: {command}") from error
    verdicts = {task.key: _verdict_on(task, known) for task in tasks}
    unchecked = [key for key, verdict in verdicts.items() if verdict is None]
    if unchecked:
        raise UncheckedTasksError(
            f"learner.select.checked: {len(unchecked)} of {len(tasks)} tasks of {path}, such as"
            f" {unchecked[0]!r}, are unchecked: {checks} has no result of them as they are now;"
            f" run {command}"
        )
    valid = [task for task in tasks if verdicts[task.key] is Outcome.VALID]
    if not valid:
        counts = Counter(verdict for verdict in verdicts.values() if verdict)
        found = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        raise TaskFilterError(
            f"learner.select.checked leaves none of the {len(tasks)} tasks of {path}: {checks} has"
            f" {found}"
        )
    return valid


def _verdict_on(task: Task, known: Mapping[str, TaskCheck]) -> Outcome | None:
    """Return the verdict on exactly this task; None if there is none."""
    found = known.get(task.key)
    if found is None or found.digest != task_digest(parse_task(task.json), json.loads(task.json)):
        return None
    return found.verdict


def _active_filters(config: SelectConfig) -> list[_Filter]:
    """Return the filters that are set, in order of application."""
    facts = [
        _Filter("modality", [config.modality or ""], lambda task: modality_of(task.json)),
        _Filter("env_keys", config.env_keys, lambda task: task.env_key),
        _Filter("difficulty", [str(level) for level in config.difficulty], _field_of("difficulty")),
        _Filter(
            "data_version",
            [config.data_version or ""],
            _field_of("data_version"),
            "\n  it selects by a task's own data_version; for another dataset, set learner.tasks",
        ),
    ]
    return [each for each in facts if any(each.wanted)]


def _field_of(name: str) -> Callable[[Task], str]:
    """Return a reader of one field of a task's JSON as text; empty if there is none."""

    def read_field(task: Task) -> str:
        value = json.loads(task.json).get(name)
        return "" if value is None else str(value)

    return read_field


def _format_values(each: _Filter, tasks: Sequence[Task]) -> str:
    found = sorted({each.value_of(task) or f"no {each.key}" for task in tasks})
    more = f" and {len(found) - _SHOWN} others" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _check_environments(tasks: Sequence[Task], config: SelectConfig, path: str) -> None:
    known = sorted({task.env_key for task in tasks})
    for name in config.env_keys:
        if name not in known:
            raise TaskFilterError(
                f"learner.select.env_keys: {path} has no environment {name!r}"
                f"{did_you_mean(name, known)}"
            )


def _check_tools(tasks: Sequence[Task], config: SelectConfig, path: str) -> None:
    known = sorted({task.env_key for task in tasks} | {task.key for task in tasks})
    for name in config.tools:
        if name not in known:
            raise TaskFilterError(
                f"learner.select.tools: {path} has no environment or task {name!r}"
                f"{did_you_mean(name, known)}"
            )


def _offer_tools(task: Task, config: SelectConfig) -> Task:
    names = config.tools.get(task.key) or config.tools.get(task.env_key)
    if names is None:
        return task
    fields = {**json.loads(task.json), "offered_tools": names}
    return replace(task, json=json.dumps(fields, ensure_ascii=False))


def _selection_hash(seed: int) -> Callable[[Task], bytes]:
    return lambda task: hashlib.sha256(f"{seed}/{task.key}".encode()).digest()
