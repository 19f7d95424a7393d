"""Whether the tasks can be read, and their environments and data exist where they will run."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.launcher.doctor.ports import used_backends
from services.launcher.doctor.results import (
    Finding,
    NotApplicableError,
    Status,
    fail,
    ok,
)
from services.launcher.doctor.subject import Subject, is_made_later
from services.launcher.runs import GATEWAY, LEARNER

FLEET_BACKENDS = ("fleet", "fleet_openenv")


@dataclass(frozen=True, slots=True)
class Version:
    """Of an environment and its data, as tasks name them; "" is whatever is newest."""

    env_key: str
    env_version: str
    data_version: str


class TaskFileError(Exception):
    """A task file cannot be used; the message says why."""


async def dataset(subject: Subject) -> list[Finding]:
    section = subject.section(LEARNER)
    paths = {section["tasks"]: "learner.tasks"}
    for number, chosen in enumerate(section["eval"]["sets"]):
        paths.setdefault(chosen["tasks"], f"learner.eval.sets.{number}.tasks")
    findings: list[Finding] = []
    counts: Counter[Version] = Counter()
    for path, key in paths.items():
        finding = await _counted(subject, path, key, counts)
        findings.extend([finding] if finding else [])
    if counts:
        findings.append(ok(_told(counts)))
    return [*findings, *await _at_fleet(subject, sorted(counts, key=str))]


async def _counted(
    subject: Subject, path: str, key: str, counts: Counter[Version]
) -> Finding | None:
    if is_made_later(subject, path):
        return Finding(Status.SKIPPED, f"{path} is made by [[prepare]] first")
    if subject.backend == "sky" and "://" in path:
        return Finding(Status.SKIPPED, f"{path} is fetched by the machines")
    try:
        tasks = await asyncio.to_thread(read_tasks, Path(path))
    except TaskFileError as error:
        return fail(f"{key}: {error}", f"correct {key}, or make the file")
    counts.update(version_of(task) for task in tasks)
    return None


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """The tasks of a file. Raises TaskFileError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskFileError(f"{path}: {error}") from error
    tasks = content.get("tasks") if isinstance(content, dict) else content
    if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
        raise TaskFileError(f'{path}: expected a list of tasks or {{"tasks": [...]}}')
    if not tasks:
        raise TaskFileError(f"{path} holds no task")
    for number, task in enumerate(tasks):
        if not (_field(task, "key", "task_key") and env_key_of(task)):
            raise TaskFileError(f"{path}: task {number} has no key, or no env_id")
    return tasks


def env_key_of(task: Mapping[str, Any]) -> str:
    return _field(task, "env_id", "env_key")


def version_of(task: Mapping[str, Any]) -> Version:
    return Version(
        env_key_of(task), _field(task, "version", "env_version"), _field(task, "data_version")
    )


def _field(task: Mapping[str, Any], *names: str) -> str:
    """A field by the first of its names that the task uses."""
    return next((str(task[name]) for name in names if task.get(name) is not None), "")


def _told(counts: Counter[Version]) -> str:
    envs: Counter[str] = Counter()
    for version, count in counts.items():
        envs[version.env_key] += count
    return ", ".join(f"{count} tasks of {env_key}" for env_key, count in sorted(envs.items()))


async def _at_fleet(subject: Subject, versions: list[Version]) -> list[Finding]:
    gateway = subject.sections.get(GATEWAY)
    if gateway is None or not versions or not used_backends(subject) & set(FLEET_BACKENDS):
        return []
    from services.launcher.adapters import probes_http

    backend_of = {name: own["backend"] for name, own in gateway["environments"].items()}
    theirs = [
        version
        for version in versions
        if (backend_of.get(version.env_key) or gateway["backend"]) in FLEET_BACKENDS
    ]
    try:
        return await probes_http.fleet_versions(subject, theirs)
    except NotApplicableError:
        # An emulator that the gateway starts: the canary episodes ask it.
        return []
