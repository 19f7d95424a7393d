"""Canary tasks, some played per environment before a run, and a check that verifiers compile."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.tasks.task_files import TaskFileError
from flotilla_common.tasks.task_format import SCREEN_MODALITIES
from flotilla_launcher.config.backend_tables import FLEET_BACKENDS, backend_of
from flotilla_launcher.doctor.dataset import (
    FLEET_OPENENV,
    TaskSelectionError,
    comes_later,
    env_key_of,
    filter_tasks,
    key_of,
    read_tasks,
    select_tasks,
    task_field,
)
from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, warn
from flotilla_launcher.doctor.probe_process import ScriptError, run_script
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import GATEWAY, LEARNER, RunMode

# Compiling this many takes a second or two.
_MOST_VERIFIERS = 1000
_MOST_CANARIES = 4
_CHECK_SCRIPT = """
import json, sys
from flotilla_env_gateway.verify.verifier_source import VerifierError, find_verifier

wrong = {}
for digest, source in json.load(sys.stdin).items():
    try:
        find_verifier(source)
    except VerifierError as error:
        wrong[digest] = str(error)
print(json.dumps(wrong))
"""


@dataclass(frozen=True, slots=True)
class Canary:
    """A task that is played for an environment. `verifier` is the source with which the gateway
    grades it; "" if another service grades it."""

    env_key: str
    backend: str
    task: Mapping[str, Any]
    verifier: str


async def choose_canaries(
    context: RunContext,
) -> tuple[dict[str, list[Canary]], list[Finding]]:
    """Choose canaries for each environment of the tasks that the run uses, and report
    verifiers that do not compile. Environments that the run does not use get none, and those of
    Fleet one, because an instance costs money."""
    section = context.get_section(GATEWAY)
    by_env: dict[str, list[Canary]] = {}
    for task in await _list_used_tasks(context):
        canary = _make_canary(section, task)
        by_env.setdefault(canary.env_key, []).append(canary)
    wrong = await _check_verifiers(context, [each for env in by_env.values() for each in env])
    findings: list[Finding] = []
    found: dict[str, list[Canary]] = {}
    for env_key in sorted(by_env):
        whole = [each for each in by_env[env_key] if _source_digest(each.verifier) not in wrong]
        broken = [each for each in by_env[env_key] if _source_digest(each.verifier) in wrong]
        if broken:
            findings.append(
                _report_broken(broken, wrong[_source_digest(broken[0].verifier)], whole)
            )
        if whole:
            found[env_key] = _spread(whole)
    return found, findings


def _spread(whole: Sequence[Canary]) -> list[Canary]:
    """Return a few canaries from all parts of the task files, the first one included. Tasks on
    screens come before others: their prompts are the longest."""
    whole = sorted(whole, key=lambda each: each.task.get("task_modality") not in SCREEN_MODALITIES)
    count = 1 if whole[0].backend in FLEET_BACKENDS else min(_MOST_CANARIES, len(whole))
    return [whole[number * len(whole) // count] for number in range(count)]


async def _list_used_tasks(context: RunContext) -> list[Mapping[str, Any]]:
    """Return the tasks that are trained or evaluated on. Raises NotApplicableError."""
    section = context.get_section(LEARNER)
    sets = [each["tasks"] for each in section["eval"]["sets"]]
    trained = [section["tasks"]] if context.mode is RunMode.TRAIN or not sets else []
    paths = list(dict.fromkeys(path for path in (*trained, *sets) if path))
    if not paths:
        raise NotApplicableError("the run imitates, and plays no task")
    here = [path for path in paths if not comes_later(context, path)]
    if not here:
        raise NotApplicableError(comes_later(context, paths[0]))
    try:
        files = {path: read_tasks(Path(path)) for path in here}
        used = (await select_tasks(context, section, here)).files
    except (TaskFileError, TaskSelectionError) as error:
        raise NotApplicableError(f"there is no task to open: {error}") from error
    wrong = next((reason for _, reason in used.values() if reason), "")
    if wrong:
        raise NotApplicableError(f"there is no task to open: {wrong}")
    return [task for path in here for task in filter_tasks(files[path], used[path][0])]


def _make_canary(section: Mapping[str, Any], task: Mapping[str, Any]) -> Canary:
    env_key = env_key_of(task)
    backend = backend_of(section, env_key)
    config = section["backends"].get(backend) or {}
    elsewhere = (
        backend == FLEET_OPENENV
        or (backend == "fleet" and config.get("verify") == "remote")
        or (backend == "openenv" and config.get("reward") != "verifier")
    )
    verifier = "" if elsewhere else task_field(task, "verifier_func", "verifier_code")
    return Canary(env_key, backend, task, verifier)


async def _check_verifiers(context: RunContext, found: Sequence[Canary]) -> dict[str, str]:
    """Return the gateway's objections to verifiers, by source digest. No verifier is executed."""
    sources = {_source_digest(each.verifier): each.verifier for each in found if each.verifier}
    given = dict(list(sources.items())[:_MOST_VERIFIERS])
    if not given:
        return {}
    try:
        return await run_script(_CHECK_SCRIPT, given, context.environ)
    except ScriptError as error:
        raise NotApplicableError(f"the gateway's own check of verifiers {error}") from error


def _report_broken(broken: Sequence[Canary], why: str, whole: Sequence[Canary]) -> Finding:
    env_key, key = broken[0].env_key, key_of(broken[0].task)
    fix = "correct verifier_func in the task file"
    if whole:
        count = f"{len(broken)} of its {len(broken) + len(whole)} tasks never get a grade"
        return warn(f"{env_key}: {count}; of {key!r}, {why}", fix)
    return fail(f"{env_key}: no task can be graded; of {key!r}, {why}", fix)


def _source_digest(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()
