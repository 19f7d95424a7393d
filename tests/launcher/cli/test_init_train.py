"""`flotilla init --train`: what it needs, and what it says of a folder that lacks it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flotilla_launcher.cli.app import app
from flotilla_launcher.cli.init_train import DEMONSTRATIONS, RUN_SPEC, TASKS, train_folder


def test_the_file_that_is_missing_is_named_with_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (RUN_SPEC, DEMONSTRATIONS, *TASKS):
        assert train_folder(tmp_path, 0) == 1
        shown = " ".join("".join(capsys.readouterr()).split())
        assert f"has no {each}: `flotilla init NAME --mcp ...` makes such a folder" in shown
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).touch()


def test_a_policy_that_cannot_be_built_starts_no_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for each in (RUN_SPEC, DEMONSTRATIONS, *TASKS):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).touch()
    assert train_folder(tmp_path, 0) == 1
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "tasks/train.jsonl: expected a JSON array of tasks" in shown
    assert "the tiny policy was not built; its reason is above" in shown
    assert not (tmp_path / "runs").exists()


def test_without_a_server_and_without_train_it_says_what_to_name() -> None:
    result = CliRunner().invoke(app, ["init", "office"])
    assert result.exit_code == 2
    assert "name a server, or --train in a folder that is there" in " ".join(
        result.output.replace("│", " ").split()
    )
