"""Which task of each environment is played before a run, and verifiers that do not compile."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.interpreter import python
from services.launcher.doctor.dataset import (
    FLEET_OPENENV,
    ChooseError,
    TaskFileError,
    chosen,
    comes_later,
    env_key_of,
    key_of,
    read_tasks,
    task_field,
    those_of,
)
from services.launcher.doctor.findings import Finding, NotApplicableError, fail, first_line, warn
from services.launcher.doctor.probe_process import output_of
from services.launcher.doctor.run_context import Subject
from services.launcher.state import GATEWAY, LEARNER, RunMode

# So many are compiled: a second or two.
_MOST_VERIFIERS = 1000
_COMPILE = """
import json, sys
from services.env_gateway.verify.source_shape import VerifierError, find_verifier

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
    """The task of an environment that is played. `verifier` is the source that grades it in the
    gateway; "" where somebody else does."""

    env_key: str
    backend: str
    task: Mapping[str, Any]
    verifier: str


async def canaries(subject: Subject) -> tuple[list[Canary], list[Finding]]:
    """One for each environment of the tasks that the run uses, and what is wrong with the others:
    an instance costs money, and so none is made of an environment that the run leaves alone."""
    section = subject.section(GATEWAY)
    by_env: dict[str, list[Canary]] = {}
    for task in await _used(subject):
        canary = _canary(section, task)
        by_env.setdefault(canary.env_key, []).append(canary)
    wrong = await _uncompiled(subject, [each for env in by_env.values() for each in env])
    findings: list[Finding] = []
    found: list[Canary] = []
    for env_key in sorted(by_env):
        whole = [each for each in by_env[env_key] if _digest(each.verifier) not in wrong]
        broken = [each for each in by_env[env_key] if _digest(each.verifier) in wrong]
        if broken:
            findings.append(_broken(broken, wrong[_digest(broken[0].verifier)], whole))
        found += whole[:1]
    return found, findings


async def _used(subject: Subject) -> list[Mapping[str, Any]]:
    """The tasks that are trained or evaluated on. Raises NotApplicableError."""
    section = subject.section(LEARNER)
    sets = [each["tasks"] for each in section["eval"]["sets"]]
    trained = [section["tasks"]] if subject.mode is RunMode.TRAIN or not sets else []
    paths = list(dict.fromkeys([*trained, *sets]))
    here = [path for path in paths if not comes_later(subject, path)]
    if not here:
        raise NotApplicableError(comes_later(subject, paths[0]))
    try:
        files = {path: read_tasks(Path(path)) for path in here}
        used = await chosen(subject, section, here)
    except (TaskFileError, ChooseError) as error:
        raise NotApplicableError(f"there is no task to open: {error}") from error
    wrong = next((said for _, said in used.values() if said), "")
    if wrong:
        raise NotApplicableError(f"there is no task to open: {wrong}")
    return [task for path in here for task in those_of(files[path], used[path][0])]


def _canary(section: Mapping[str, Any], task: Mapping[str, Any]) -> Canary:
    env_key = env_key_of(task)
    own = section["environments"].get(env_key) or {}
    backend = own.get("backend") or section["backend"]
    config = section["backends"].get(backend) or {}
    elsewhere = (
        backend == FLEET_OPENENV
        or (backend == "fleet" and config.get("verify") == "remote")
        or (backend == "openenv" and config.get("reward") != "verifier")
    )
    verifier = "" if elsewhere else task_field(task, "verifier_func", "verifier_code")
    return Canary(env_key, backend, task, verifier)


async def _uncompiled(subject: Subject, found: Sequence[Canary]) -> dict[str, str]:
    """By their digests what the gateway has against verifiers, none of which is run."""
    sources = {_digest(each.verifier): each.verifier for each in found if each.verifier}
    given = dict(list(sources.items())[:_MOST_VERIFIERS])
    if not given:
        return {}
    command = python("-c", _COMPILE)
    code, output, errors = await output_of(command, json.dumps(given).encode(), subject.environ)
    if code != 0:
        last = first_line("\n".join(reversed(errors.strip().splitlines())))
        raise NotApplicableError(f"the gateway's own check of verifiers ended with {code}: {last}")
    return json.loads(output)


def _broken(broken: Sequence[Canary], why: str, whole: Sequence[Canary]) -> Finding:
    env_key, key = broken[0].env_key, key_of(broken[0].task)
    fix = "correct verifier_func in the task file"
    if whole:
        count = f"{len(broken)} of its {len(broken) + len(whole)} tasks never get a grade"
        return warn(f"{env_key}: {count}; of {key!r}, {why}", fix)
    return fail(f"{env_key}: no task can be graded; of {key!r}, {why}", fix)


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()
