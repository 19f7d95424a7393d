"""Recovery of a run that has lost data: from its upload, or from its intact local files."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.process.child_environment import child_environment
from services.common.process.python_command import python_command
from services.launcher.cli.terminal import CommandError, Terminal
from services.launcher.security.env_filter import STORE_VARIABLES


class RestoreFailedError(CommandError):
    """Raised when the run cannot be recovered; the message states the cause."""


def restore_run(
    url: str, spec: Path, runs: Path, overrides: Sequence[str], console: Terminal
) -> str:
    """Restore the run uploaded to a URL into the runs folder and return its id. Raises
    RestoreFailedError."""
    arguments = [url, "--config", str(spec), "--runs", str(runs), *overrides]
    console.print(f"Restoring {url}", soft_wrap=True)
    found = _run_learner_program("services.learner.checkpoints.restore_command", arguments, console)
    text = f"Restored run {found['run_id']} at step {found['step']}"
    console.print(text + _format_losses(found), soft_wrap=True)
    return str(found["run_id"])


def accept_loss(run_dir: Path, console: Terminal) -> None:
    """Accept the data loss in a stopped run's journal. Raises RestoreFailedError."""
    found = _run_learner_program(
        "services.learner.checkpoints.accept_loss_command", [str(run_dir)], console
    )
    text = "The journal has no known data loss: --accept-loss changes nothing"
    if found:
        text = f"Run {found['run_id']} resumes from step {found['step']}"
    console.print(text + _format_losses(found), soft_wrap=True)


def _run_learner_program(
    module: str, arguments: Sequence[str], console: Terminal
) -> dict[str, Any]:
    """Run a program of the learner and return the object that it prints. Store and journal belong
    to the learner, so its own programs read them."""
    command = [*python_command("-m", module), *arguments]
    environ = child_environment(*STORE_VARIABLES, ours=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    notes, _, error = (
        done.stderr.rpartition("error: ") if done.returncode else (done.stderr, "", "")
    )
    if notes.strip():
        console.print(notes.strip(), soft_wrap=True)
    if done.returncode:
        raise RestoreFailedError(error.strip() or f"{module} ended with {done.returncode}")
    return json.loads(done.stdout)


def _format_losses(found: dict[str, Any]) -> str:
    if not (found and (found["lost"] or found["lost_steps"])):
        return ""
    return (
        f"; lost with its disk: at least {found['lost']} newer attempts and {found['lost_steps']}"
        " newer steps"
    )
