"""Fetches a run from where its checkpoints are uploaded, so that it can go on here."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


class RestoreFailedError(Exception):
    """The run cannot be resumed from there; the message says why."""


def is_url(run: str) -> bool:
    """Whether a run is named by where it is uploaded to, not by its id."""
    return "://" in run


def restore(url: str, spec: Path, runs: Path, overrides: Sequence[str], console: Console) -> str:
    """Have the run of a URL in the runs folder; returns its id. Raises RestoreFailedError."""
    # The store is the learner's: its own program reads it, in a process of its own.
    command = [sys.executable, "-m", "services.learner.restore", url, "--config", str(spec)]
    command += ["--runs", str(runs), *overrides]
    console.print(f"Restoring {url}", markup=False, highlight=False, soft_wrap=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told, _, error = done.stderr.rpartition("error: ") if done.returncode else (done.stderr, "", "")
    if told.strip():
        console.print(told.strip(), markup=False, highlight=False, soft_wrap=True)
    if done.returncode:
        raise RestoreFailedError(error.strip() or f"restoring it ended with {done.returncode}")
    found = json.loads(done.stdout)
    text = f"Restored run {found['run_id']} at step {found['step']}"
    if found["lost"] or found["lost_steps"]:
        text += (
            f"; lost with its disk: at least {found['lost']} attempts and {found['lost_steps']}"
            " steps that were newer"
        )
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return str(found["run_id"])
