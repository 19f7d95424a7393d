"""Commands of `flotilla` that are programs of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from flotilla_common.process import own_packages
from flotilla_common.process.spec_commands import OTHER_COMMANDS, PROGRAMS
from flotilla_launcher.cli import tool_commands
from flotilla_launcher.cli.app import app
from tests.support.started_process import end_process, start_process

FLOTILLA = (sys.executable, "-P", "-m", "flotilla_launcher.cli.app")


def test_a_run_spec_may_name_what_flotilla_knows_and_nothing_else() -> None:
    known = set(typer.main.get_group(app).commands)
    assert known == OTHER_COMMANDS | {name.partition(" ")[0] for name in PROGRAMS}


def test_tasks_are_written_by_the_command_and_its_help_is_the_programs_own(tmp_path: Path) -> None:
    made = tmp_path / "tasks.json"
    words = ("tasks", "--split", "heldout", "--count", "2", "--out", str(made))
    subprocess.run([*FLOTILLA, *words], check=True, capture_output=True)
    assert len(json.loads(made.read_text())["tasks"]) == 2
    told = subprocess.run(
        [*FLOTILLA, "tasks", "--help"], check=True, capture_output=True, text=True
    )
    assert told.stdout.startswith("usage: flotilla tasks")
    assert "--solutions" in told.stdout


def test_the_served_environments_are_the_process_that_was_started() -> None:
    process, line = start_process((*FLOTILLA, "env", "serve", "--port", "0"))
    assert json.loads(line)["url"].startswith("http://127.0.0.1:")
    end_process(process)
    assert process.returncode == 0


def test_without_the_environments_the_command_says_what_brings_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        tool_commands, "folder_of", lambda name: own_packages.folder_of(f"no_{name}")
    )
    done = CliRunner().invoke(app, ["gsm8k", "--help"])
    assert done.exit_code == 1
    assert "has no flotilla_environments: pip install 'flotilla-rl[environments]'" in done.output
