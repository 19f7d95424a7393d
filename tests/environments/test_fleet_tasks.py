"""Task files made from Fleet's own answer, as the emulator gives it."""

import json
from pathlib import Path
from typing import Any

import pytest

from environments import fleet_tasks
from environments.fleet_tasks import as_task, main, split_tasks
from environments.tasks import load_tasks, make_tasks
from services.common.tasks.task_format import parse_task
from tests.environments.fleet_emulator_process import emulating

ENVS = ("booking", "tracker", "shop")


def reports(**changes: Any) -> dict[str, Any]:
    return {
        "key": "a",
        "prompt": "do it",
        "environment_id": "shop",
        "verifier": {"code": "def check(env): return 1"},
        **changes,
    }


def fetched(
    tmp_path: Path, *options: str
) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    paths = tmp_path / "train.json", tmp_path / "heldout.json"
    code = main(["--train", str(paths[0]), "--heldout", str(paths[1]), *options])
    train, heldout = (load_tasks(path) if path.exists() else [] for path in paths)
    return code, train, heldout


def test_what_fleet_has_comes_back_as_the_tasks_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {task["key"]: task for task in make_tasks(ENVS, "train", 60)}
    file = tmp_path / "given.json"
    file.write_text(json.dumps({"tasks": list(given.values())}))
    monkeypatch.setenv("FLEET_API_KEY", "secret-of-the-account")
    with emulating("--tasks", str(file)) as url:
        monkeypatch.setenv("FLEET_BASE_URL", url)
        code, train, heldout = fetched(tmp_path)
        assert (code, len(train), len(heldout)) == (0, 48, 12)
        assert {task["key"]: task for task in [*train, *heldout]} == given
        assert all(parse_task(json.dumps(task)).verifier for task in train)
        code, train, heldout = fetched(tmp_path, "--env", "shop", "--heldout-per-env", "2")
    assert (code, len(train), len(heldout)) == (0, 18, 2)
    assert {task["env_id"] for task in train} == {"shop"}


def test_a_wrong_key_a_missing_key_and_a_silent_host_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    assert fetched(tmp_path) == (1, [], [])
    assert "FLEET_API_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("FLEET_API_KEY", "secret-of-the-account")
    with emulating(FLOTILLA_ENV_TOKEN="another") as url:
        assert fetched(tmp_path, "--url", url) == (1, [], [])
    error = capsys.readouterr().err
    assert "HTTP 401" in error
    assert "check FLEET_API_KEY" in error
    assert fetched(tmp_path, "--url", url) == (1, [], [])
    assert "Connection refused" in capsys.readouterr().err
    assert fetched(tmp_path, "--url", "file:///etc/passwd") == (1, [], [])
    error += capsys.readouterr().err
    assert "is no address" in error
    assert "secret-of-the-account" not in error


def test_an_account_without_tasks_is_an_error_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", "any")
    monkeypatch.setattr(fleet_tasks, "fetch_tasks", lambda *_: [reports(verifier=None)])
    assert fetched(tmp_path, "--env", "shop") == (1, [], [])
    error = capsys.readouterr().err
    assert "1 tasks lack a verifier or a prompt" in error
    assert "no tasks of shop for this account" in error


@pytest.mark.parametrize(
    "changes",
    [
        {"verifier": None},
        {"verifier": {"code": " "}},
        {"verifier": {"code": "<error loading code: NoSuchKey>"}},
        {"prompt": None},
    ],
)
def test_a_task_that_cannot_be_graded_or_begun_is_left_out(changes: dict[str, Any]) -> None:
    assert as_task(reports(**changes), "tool_use") is None


def test_modality_and_difficulty_are_the_tasks_own_where_it_states_them() -> None:
    plain = as_task(reports(), "computer_use")
    assert plain is not None
    assert (plain["task_modality"], "difficulty" in plain) == ("computer_use", False)
    metadata = {"task_modality": "browser_use", "difficulty": 2}
    own = as_task(reports(metadata=metadata, difficulty=3), "tool_use")
    assert own is not None
    assert (own["task_modality"], own["difficulty"]) == ("browser_use", 3)


def test_an_added_task_moves_at_most_one_other_to_the_other_side() -> None:
    tasks = list(make_tasks(["shop"], "train", 120))
    sides = [{task["key"] for task in split_tasks(tasks[:count], 20)[1]} for count in (119, 120)]
    assert len(sides[0] - sides[1]) <= 1
    assert len(sides[1]) == 20


def test_a_small_environment_keeps_four_fifths_for_training() -> None:
    train, heldout = split_tasks(list(make_tasks(ENVS, "train", 12)), 20)
    assert (len(train), heldout) == (12, [])
    train, heldout = split_tasks(list(make_tasks(ENVS, "train", 30)), 20)
    assert (len(train), len(heldout)) == (24, 6)
