"""What `sky launch --env` chooses of a whole run on one machine, from its script to the learner."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from services.common.config import load_spec
from services.launcher import cli
from services.launcher.console import train
from services.learner.sampling.config import SelectConfig

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy/sky/openenv-fleet-grpo.yaml"


def arguments_of(tmp_path: Path, **chosen: str) -> list[str]:
    """What the task's script calls `flotilla` with, run as the machine runs it."""
    task = yaml.safe_load(FILE.read_text())
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    done = subprocess.run(
        ("bash", "-c", task["run"]),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], **task["envs"], **chosen},
        check=True,
        capture_output=True,
        text=True,
    )
    option, module, *arguments = done.stdout.split("\0")[:-1]
    assert (option, module) == ("-m", "services.launcher.cli")
    return arguments


def selected(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> SelectConfig:
    """What the learner makes of it, after the command line's own parser."""
    found: list[dict[str, Any]] = []

    def take(path: Path, runs: Path, overrides: list[str], *, resume: bool, run_id: str) -> int:
        found.append(load_spec(ROOT / path, overrides))
        return 0

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train, "train", take)
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    return SelectConfig.model_validate(found[0]["learner"]["select"])


@pytest.mark.parametrize("version", ["0.3", "3", "true", "2026-01-31", "v1.2", "v'1"])
def test_a_data_version_stays_text_whatever_it_looks_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    arguments = arguments_of(tmp_path, DATA_VERSION=version)
    assert selected(arguments, monkeypatch).data_version == version


def test_the_choices_come_to_the_learner_and_none_of_them_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"MODALITY": "tool_use", "ENV_KEYS": "shop, booking", "DIFFICULTY": "2,3"}
    evil = '$(touch pwned)`touch pwned`"; touch pwned; \\'
    arguments = arguments_of(tmp_path, MAX_TASKS="100", DATA_VERSION=evil, **chosen)
    assert selected(arguments, monkeypatch) == SelectConfig(
        modality="tool_use",
        env_keys=("shop", "booking"),
        difficulty=(2, 3),
        max_tasks=100,
        data_version="$(touch pwned)`touch pwned`; touch pwned; ",
    )
    assert not (tmp_path / "pwned").exists()
