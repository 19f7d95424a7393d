"""Recovery of a run that has lost data: from its upload, or from its intact local files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.run_child import run_child
from flotilla_launcher import learner_programs
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.security.service_variables import STORE_VARIABLES


class RestoreFailedError(CommandError):
    """Raised when the run cannot be recovered; the message states the cause."""


async def restore_run(
    url: str, spec: Path, runs: Path, overrides: Sequence[str], console: Terminal
) -> str:
    """Restore the run uploaded to a URL into the runs folder and return its id. Raises
    RestoreFailedError."""
    arguments = (url, "--config", str(spec), "--runs", str(runs), *overrides)
    console.print(f"Restoring {url}", soft_wrap=True)
    found = await _run_learner_program(learner_programs.RESTORE, arguments, console)
    text = f"Restored run {found['run_id']} at step {found['step']}"
    console.print(text + _format_losses(found), soft_wrap=True)
    return str(found["run_id"])


async def fetch_for_reading(
    url: str, spec: Mapping[str, Any], runs: Path, console: Terminal
) -> None:
    """Fetch what readers need of the run uploaded to a URL into an empty runs folder. Raises
    RestoreFailedError."""
    path = runs / "spec.json"
    path.write_text(json.dumps(spec))
    arguments = (url, "--config", str(path), "--runs", str(runs), "--for-reading")
    console.print(f"Fetching {url}", style="dim", soft_wrap=True)
    found = await _run_learner_program(learner_programs.RESTORE, arguments, console)
    text = f"Run {found['run_id']} as of its upload at step {found['step']}"
    console.print(text + _format_losses(found), soft_wrap=True)


async def accept_loss(run_dir: Path, console: Terminal) -> None:
    """Accept the data loss in a stopped run's journal. Raises RestoreFailedError."""
    arguments = (str(run_dir),)
    found = await _run_learner_program(learner_programs.ACCEPT_LOSS, arguments, console)
    text = "The journal has no known data loss: --accept-loss changes nothing"
    if found:
        text = f"Run {found['run_id']} resumes from step {found['step']}"
    console.print(text + _format_losses(found), soft_wrap=True)


async def _run_learner_program(
    program: str, arguments: Sequence[str], console: Terminal
) -> dict[str, Any]:
    """Run a program of the learner and return the object that it prints. Store and journal belong
    to the learner, so its own programs read them."""
    command = learner_programs.learner_command(program, *arguments)
    done = await run_child(command, env=child_environment(*STORE_VARIABLES, ours=True))
    errors = done.errors.decode(errors="replace")
    notes, _, error = errors.rpartition("error: ") if done.code else (errors, "", "")
    if notes.strip():
        console.print(notes.strip(), soft_wrap=True)
    if done.code:
        raise RestoreFailedError(error.strip() or f"{program} ended with {done.code}")
    return json.loads(done.output)


def _format_losses(found: dict[str, Any]) -> str:
    if not (found and (found["lost"] or found["lost_steps"])):
        return ""
    return (
        f"; lost with its disk: at least {found['lost']} newer attempts and {found['lost_steps']}"
        " newer steps"
    )
