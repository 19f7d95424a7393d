"""Has a run that has lost something go on: from where it is uploaded, or from what is left here."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.child_environment import child_environment
from services.common.interpreter import python
from services.launcher.cli.terminal import Terminal
from services.launcher.security.env_filter import STORE


class RestoreFailedError(Exception):
    """The run cannot be resumed from there; the message says why."""


def is_url(run: str) -> bool:
    """Whether a run is named by where it is uploaded to, not by its id."""
    return "://" in run


def restore(url: str, spec: Path, runs: Path, overrides: Sequence[str], console: Terminal) -> str:
    """Have the run of a URL in the runs folder; returns its id. Raises RestoreFailedError."""
    arguments = [url, "--config", str(spec), "--runs", str(runs), *overrides]
    console.print(f"Restoring {url}", soft_wrap=True)
    found = _told_by("services.learner.checkpoints.restore_command", arguments, console)
    text = f"Restored run {found['run_id']} at step {found['step']}"
    console.print(text + _losses(found), soft_wrap=True)
    return str(found["run_id"])


def accept_loss(run_dir: Path, console: Terminal) -> None:
    """Have a stopped run give up what its journal has lost. Raises RestoreFailedError."""
    found = _told_by("services.learner.journal.accept_loss_command", [str(run_dir)], console)
    text = "The journal has lost nothing that is known: --accept-loss changes nothing"
    if found:
        text = f"Run {found['run_id']} goes on from step {found['step']}"
    console.print(text + _losses(found), soft_wrap=True)


def _told_by(module: str, arguments: Sequence[str], console: Terminal) -> dict[str, Any]:
    """Return what a program of the learner prints: store and journal are the learner's, so they are
    read in a process of its own."""
    command = [*python("-m", module), *arguments]
    environ = child_environment(*STORE, ours=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    told, _, error = done.stderr.rpartition("error: ") if done.returncode else (done.stderr, "", "")
    if told.strip():
        console.print(told.strip(), soft_wrap=True)
    if done.returncode:
        raise RestoreFailedError(error.strip() or f"{module} ended with {done.returncode}")
    return json.loads(done.stdout)


def _losses(found: dict[str, Any]) -> str:
    if not (found and (found["lost"] or found["lost_steps"])):
        return ""
    return (
        f"; lost with its disk: at least {found['lost']} attempts and {found['lost_steps']} steps"
        " that were newer"
    )
