"""Files that a runner's jobs leave to each other lie where no checkout removes them."""

import os
import subprocess
from pathlib import Path

import yaml

from tests.deploy.workflows.test_steps import FORM, REQUEST, checkout
from tests.support.repository import ROOT

# By workflow, the steps that talk to a launcher.
REQUESTING = {"train-skypilot": ("submit", "cancel"), "reap": ("reap",)}


def run_of(workflow: str, name: str) -> str:
    text = (ROOT / f".github/workflows/{workflow}.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    (found,) = [each["run"] for each in job["steps"] if each.get("id") == name]
    return found


def test_every_step_has_the_same_ledger_outside_of_the_checkout(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "job", flotilla='printf "%s\\n" "$@"')
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "REQUEST_ID": REQUEST}
    for workflow, steps in REQUESTING.items():
        for name in steps:
            done = subprocess.run(
                ("bash", "-e", "-c", run_of(workflow, name)),
                cwd=folder,
                env={**environ, **FORM},
                check=True,
                capture_output=True,
                text=True,
            )
            words = done.stdout.splitlines()
            assert words[0] == name
            assert words[words.index("--runs") + 1] == str(tmp_path / "home/flotilla-runs")
