"""Examination of the tasks: they can be read, some of them are selected, and their environments
are not misspelled."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.tasks.task_files import TaskFileError, read_objects
from flotilla_launcher.doctor.findings import Finding, Status, fail, ok, warn
from flotilla_launcher.doctor.misnamed_environments import find_misnamed
from flotilla_launcher.doctor.probe_process import ScriptError, run_script
from flotilla_launcher.doctor.run_context import RunContext, is_made_later
from flotilla_launcher.state import GATEWAY, LEARNER, RunMode

FLEET_OPENENV = "fleet_openenv"
# The learner's own functions select the tasks, in a separate process. Prints for each file the keys
# of the selected tasks, each with its offered tools unless all are, and an error with its fix; and
# the evaluation sets.
_SELECT_SCRIPT = """
import json, sys
from pathlib import Path
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.learner import EvalSetConfig
from flotilla_learner.config.sampling import SelectConfig
from flotilla_learner.sampling.eval_sets import TrainedOnError, load_eval_set, refuse_trained_tasks
from flotilla_learner.sampling.prepared_tasks import check_prepared
from flotilla_learner.sampling.task_filter import TaskFilterError, UncheckedTasksError, filter_tasks
from flotilla_common.tasks.task_files import TaskFileError
from flotilla_learner.sampling.tasks import (
    UnseenPicturesError, load_tasks, refuse_unseen_pictures
)

question = json.load(sys.stdin)
select = parse_config(SelectConfig, question["select"], where="learner.select")
used = {path: [{}, ""] for path in question["files"]}

def choose(path, load):
    try:
        tasks = load()
    except TaskFileError as error:
        used[path][1] = f"{error}; correct the file"
    except TaskFilterError as error:
        used[path][1] = f"{error}; correct learner.select, or the file"
    except UncheckedTasksError as error:
        used[path][1] = str(error)
    else:
        found = tasks if isinstance(tasks, list) else tasks.tasks
        try:
            question["sees_pictures"] or refuse_unseen_pictures(found, path)
        except UnseenPicturesError as error:
            used[path][1] = str(error)
        used[path][0] |= {task.key: json.loads(task.json).get("offered_tools") for task in found}
        return tasks

path = question["tasks"]
trained = path in used and choose(
    path, lambda: filter_tasks(load_tasks(Path(path)), select, path=path, seed=question["seed"])
)
sets = []
for each in question["sets"]:
    config = parse_config(EvalSetConfig, each, where="learner.eval.sets")
    if config.tasks in used and not used[config.tasks][1]:
        sets.append(choose(config.tasks, lambda: load_eval_set(config, select)))
sets = [each for each in sets if each]
try:
    refuse_trained_tasks(trained or [], sets if question["trains"] else [])
except TrainedOnError as error:
    used[path][1] = str(error)
try:
    if question["data"] and path in used:
        check_prepared(question["data"], path, [e["tasks"] for e in question["sets"]])
except TaskFileError as error:
    used[path][1] = used[path][1] or str(error)
shown = [[each.config.name, each.by_env, each.why_empty, each.thin] for each in sets]
print(json.dumps([used, shown]))
"""
_FILE_FIX = "correct {key}, or make the file"


# Tools offered for a task, by its key; None stands for all.
Offered = Mapping[str, list[str] | None]


@dataclass(frozen=True, slots=True)
class EnvVersion:
    """Version of an environment and its data, as tasks name them; "" is the newest."""

    env_key: str
    env_version: str
    data_version: str


@dataclass(frozen=True, slots=True)
class SelectedSet:
    """An evaluation set: its tasks by environment, why it has none, and the environments of which
    its `count` leaves few."""

    name: str
    by_env: Mapping[str, int]
    why_empty: str
    thin: Sequence[str]

    def describe(self) -> Finding:
        if self.why_empty:
            what = f"evaluation set {self.name} is left out: {self.why_empty}"
            return warn(what, "hold out tasks of these environments to evaluate them")
        envs = ", ".join(f"{count} of {env}" for env, count in self.by_env.items())
        what = f"evaluation set {self.name}: {sum(self.by_env.values())} tasks, {envs}"
        return warn(f"{what}: few", "raise its count") if self.thin else ok(what)


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """What the learner uses: by file the tasks with their tools, and its objection to the file; and
    the evaluation sets."""

    files: Mapping[str, tuple[Offered, str]]
    sets: Sequence[SelectedSet] = ()


class TaskSelectionError(Exception):
    """Raised when the learner's selection does not run; the message states how it ended."""


async def examine_tasks(context: RunContext) -> tuple[list[Finding], list[EnvVersion]]:
    """Return the findings about the run's tasks, and the versions of environments and data that
    they name."""
    section = context.get_section(LEARNER)
    findings: list[Finding] = []
    files: dict[str, list[dict[str, Any]]] = {}
    for path, key in task_file_keys(section).items():
        try:
            if later := comes_later(context, path):
                findings.append(Finding(Status.SKIPPED, later))
            else:
                files[path] = await asyncio.to_thread(read_tasks, Path(path))
        except TaskFileError as error:
            findings.append(fail(f"{key}: {error}", _FILE_FIX.format(key=key)))
    try:
        used = await select_tasks(context, section, list(files))
    except TaskSelectionError as error:
        findings.append(fail(str(error), "check that the learner's environment is complete"))
        return findings, []
    counts: Counter[EnvVersion] = Counter()
    named: list[tuple[str, str]] = []
    for path, (keys, wrong) in used.files.items():
        if wrong:
            findings.append(Finding(Status.FAIL, wrong))
        left = filter_tasks(files[path], keys)
        if 0 < len(left) < len(files[path]):
            findings.append(ok(f"{len(left)} of the {len(files[path])} tasks of {path} are used"))
        counts.update(version_of(task) for task in left)
        named += [(key_of(task), env_key_of(task)) for task in left]
    if counts:
        findings.append(ok(_format_counts(counts)))
    findings += [each.describe() for each in used.sets]
    if gateway := context.sections.get(GATEWAY):
        findings += find_misnamed(gateway, named)
    return findings, sorted(counts, key=str)


def task_file_keys(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the task files, each with the config key that names it first."""
    # A run that imitates has none.
    paths = {section["tasks"]: "learner.tasks"} if section.get("tasks") else {}
    for number, each in enumerate(section.get("eval", {}).get("sets", ())):
        paths.setdefault(each["tasks"], f"learner.eval.sets.{number}.tasks")
    return paths


def comes_later(context: RunContext, path: str) -> str:
    """Explain why a file rightly cannot be checked yet; "" if it should be here."""
    if is_made_later(context, path):
        return f"{path} is made by [[prepare]] first"
    if context.backend == "sky" and "://" in path:
        return f"{path} is fetched by the machines"
    return ""


async def select_tasks(
    context: RunContext, section: Mapping[str, Any], paths: list[str]
) -> TaskSelection:
    """Return what the run uses of these files. Raises TaskSelectionError."""
    if not paths:
        return TaskSelection({})
    select: Mapping[str, Any] = section["select"]
    if (checks := select.get("checks")) and comes_later(context, checks):
        select = {**select, "checked": False, "checks": None}
    question = {
        "files": paths,
        "tasks": section["tasks"],
        "data": section["data"],
        "sets": section["eval"]["sets"],
        "select": select,
        "seed": context.shared.seed,
        "sees_pictures": context.shared.policy.vision is not None,
        "trains": context.mode is RunMode.TRAIN,
    }
    try:
        files, sets = await run_script(_SELECT_SCRIPT, question, context.environ)
    except ScriptError as error:
        raise TaskSelectionError(f"the learner's selection of tasks {error}") from error
    return TaskSelection(
        {path: (offered, wrong) for path, (offered, wrong) in files.items()},
        [SelectedSet(*each) for each in sets],
    )


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """Read the tasks of a file as objects; the learner examines their fields. Raises
    TaskFileError."""
    tasks = read_objects(path)
    for number, task in enumerate(tasks):
        if not (key_of(task) and env_key_of(task)):
            raise TaskFileError(f"{path}: task {number} has no key, or no env_id")
    return tasks


def filter_tasks(tasks: Sequence[Mapping[str, Any]], used: Offered) -> list[Mapping[str, Any]]:
    """Return the tasks that are used, in their order, as the learner hands them out."""
    return [
        task if (tools := used[key_of(task)]) is None else {**task, "offered_tools": tools}
        for task in tasks
        if key_of(task) in used
    ]


def key_of(task: Mapping[str, Any]) -> str:
    return task_field(task, "key", "task_key")


def env_key_of(task: Mapping[str, Any]) -> str:
    return task_field(task, "env_id", "env_key")


def version_of(task: Mapping[str, Any]) -> EnvVersion:
    return EnvVersion(
        env_key_of(task),
        task_field(task, "version", "env_version"),
        task_field(task, "data_version"),
    )


def task_field(task: Mapping[str, Any], *names: str) -> str:
    """Return a field by the first of its names that the task uses."""
    return next((str(task[name]) for name in names if task.get(name) is not None), "")


def _format_counts(counts: Counter[EnvVersion]) -> str:
    envs: Counter[str] = Counter()
    for version, count in counts.items():
        envs[version.env_key] += count
    return ", ".join(f"{count} tasks of {env_key}" for env_key, count in sorted(envs.items()))
