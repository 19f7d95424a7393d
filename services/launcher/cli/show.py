"""`flotilla show`: what the agent did, turn by turn."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.child_environment import child_environment
from services.common.interpreter import python
from services.launcher.cli.adapters.token_text import Decode, NoTokenizerError, decoder
from services.launcher.cli.attempt_text import draw
from services.launcher.cli.commands import JOURNAL, NoRunError, fail, run_dir_of
from services.launcher.cli.terminal import Terminal

_OK = 0


@dataclass(frozen=True, slots=True)
class Filter:
    """Which attempts to show; None takes all."""

    step: int | None = None
    env: str | None = None
    group: str | None = None
    passed: bool | None = None
    count: int = 3

    def arguments(self) -> list[str]:
        """As arguments of the learner's program that reads journals."""
        arguments = ["-n", str(self.count)]
        for name, value in (("--step", self.step), ("--env", self.env), ("--group", self.group)):
            arguments += [] if value is None else [f"{name}={value}"]
        if self.passed is not None:
            arguments.append("--passed" if self.passed else "--failed")
        return arguments


def show(run_id: str, runs: Path, chosen: Filter, policy: str | None) -> int:
    """Print decoded attempts of a run from the learner's journal.

    `policy` is the model folder or hub id with the tokenizer; None takes the run's own.
    """
    try:
        run_dir = run_dir_of(run_id, runs)
    except NoRunError as error:
        return fail(str(error))
    read = _inspect(run_dir / JOURNAL, *chosen.arguments())
    if read.returncode != 0:
        return fail(read.stderr.strip())
    lines = [json.loads(line) for line in read.stdout.splitlines()]
    *attempts, last = lines
    try:
        decode = _decoder(run_dir, policy)
    except NoTokenizerError as error:
        return fail(f"{error}; name a model folder that has it with --policy")
    _print(attempts, last["matched"], decode)
    return _OK


def show_tasks(run_id: str, runs: Path) -> int:
    """Print the tasks that a run has parked or quarantined, and why."""
    try:
        journal = run_dir_of(run_id, runs) / JOURNAL
    except NoRunError as error:
        return fail(str(error))
    read = _inspect(journal, "--tasks")
    if read.returncode != 0:
        return fail(read.stderr.strip())
    tasks = [json.loads(line) for line in read.stdout.splitlines()]
    console = Terminal()
    for task in tasks:
        head = f"{task['standing']:<12} {task['env_key']}  {task['task_key']}"
        console.print(f"{head}  {task['reason']}", soft_wrap=True)
    text = f"{len(tasks)} tasks are parked or quarantined"
    console.print(text, style="dim")
    return _OK


def _inspect(journal: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The journal is the learner's: its own program reads it, in a process of its own."""
    command = [*python("-m", "services.learner.journal.inspect_command"), str(journal), *arguments]
    environ = child_environment(ours=True)
    return subprocess.run(command, capture_output=True, text=True, env=environ)


def _decoder(run_dir: Path, policy: str | None) -> Decode:
    if policy is not None:
        return decoder(policy)
    path = run_dir / "spec.json"
    if not path.exists():
        raise NoTokenizerError(f"{path} does not exist, so the run's policy is not known")
    own = json.loads(path.read_text())["policy"]
    return decoder(own["model"], own.get("revision"))


def _print(attempts: Sequence[dict[str, Any]], matched: int, decode: Decode) -> None:
    console = Terminal()
    for attempt in attempts:
        console.print(draw(attempt, decode), soft_wrap=True)
    text = f"{len(attempts)} of {matched} attempts"
    text += "; -n shows more" if len(attempts) < matched else ""
    console.print(text, style="dim")
