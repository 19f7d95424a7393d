"""`flotilla data check`: the command itself, with a gateway and environments that are real."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.tasks.task_checks import Outcome, read_checks
from flotilla_environments.tasks import main as write_tasks
from tests.reading.data.check.planted import FAULTS, made, trust
from tests.support.launcher import forged_command
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

SPEC = ROOT / "deploy/runs/local.toml"
EMBEDDED = "--env_gateway.backend=embedded"


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[Path, Path]:
    """Six tasks of three environments, and their solutions."""
    paths = tmp_path / "tasks.json", tmp_path / "solutions.jsonl"
    words = ("--split", "train", "--count", "6", "--out", str(paths[0]))
    assert write_tasks([*words, "--solutions", str(paths[1])]) == 0
    return paths


def start(
    folder: Path, *words: object, spec: Path = SPEC, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    whole = ("-m", "flotilla_launcher.cli.app", "data", "check", str(spec), *map(str, words))
    return subprocess.Popen(
        forged_command(*whole),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def check(folder: Path, *words: object, spec: Path = SPEC) -> tuple[int, str]:
    with start(folder, *words, spec=spec) as process:
        output, errors = process.communicate(timeout=100)
    assert "Traceback" not in errors, errors
    return process.returncode, output


def change(path: Path, number: int, **fields: Any) -> str:
    """Change a task of a file, and return its key."""
    content = json.loads(path.read_text())
    content["tasks"][number] |= fields
    path.write_text(json.dumps(content))
    return content["tasks"][number]["key"]


def test_valid_tasks_are_checked_once_and_changed_ones_again(
    tmp_path: Path, tasks: tuple[Path, Path]
) -> None:
    words = (tasks[0], "--solutions", tasks[1], EMBEDDED)
    code, output = check(tmp_path, *words)
    assert code == 0, output
    lines = [line.split() for line in output.splitlines()]
    assert lines[0][:6] == ["environment", "tasks", "valid", "invalid", "error", "timeout"]
    assert [line[:4] for line in lines[1:5]] == [
        ["booking", "2", "2", "0"],
        ["shop", "2", "2", "0"],
        ["tracker", "2", "2", "0"],
        ["total", "6", "6", "0"],
    ]
    before = read_checks(tmp_path / "checks.jsonl")
    key = change(tasks[0], 0, prompt="Do what the solution does.")
    code, output = check(tmp_path, *words)
    assert (code, output.splitlines()[0]) == (0, "5 results are in checks.jsonl already")
    after = read_checks(tmp_path / "checks.jsonl")
    assert [k for k in before if before[k] != after[k]] == [key]
    code, output = check(tmp_path, *words, "--again", "--key", key)
    assert "already" not in output and read_checks(tmp_path / "checks.jsonl")[key] != after[key]


def test_an_invalid_task_is_named_with_its_reason_and_the_exit_code_tells(
    tmp_path: Path,
) -> None:
    task, solution = FAULTS["always passes"](made("shop", 0))
    trust([task], tmp_path / "digests")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    (tmp_path / "solutions.jsonl").write_text(json.dumps(solution) + "\n")
    digests = f"--env_gateway.verifiers.digests={tmp_path}/digests"
    words = ("tasks.jsonl", "--solutions", "solutions.jsonl", EMBEDDED, digests)
    code, output = check(tmp_path, *words)
    assert code == 1
    assert output.startswith(f"{task['key']}: invalid: noop: an untouched world passes")
    (found,) = read_checks(tmp_path / "checks.jsonl").values()
    assert found.verdict is Outcome.INVALID
    assert found.checks["noop"].rewards == (1.0,)


def test_without_solutions_what_needs_one_is_said_to_be_unchecked(
    tmp_path: Path, tasks: tuple[Path, Path]
) -> None:
    code, output = check(tmp_path, tasks[0], EMBEDDED, "--limit", "3", "--env", "shop,booking")
    assert code == 0, output
    for name in ("gold", "leak", "reachable"):
        assert f"{name} is unchecked for 3 tasks: there is no recorded solution" in output


def test_an_environment_that_cannot_be_opened_is_an_error_and_tried_again(
    tmp_path: Path, tasks: tuple[Path, Path]
) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[env_gateway]\nbackend = "openenv"\nopen_timeout_s = 1\n'
        '[env_gateway.backends.openenv]\nurl = "http://127.0.0.1:9"\n'
    )
    words = (tasks[0], "--solutions", tasks[1], "--limit", "1")
    for _ in range(2):
        code, output = check(tmp_path, *words, spec=spec)
        assert code == 1
        assert ": error: " in output and "cannot be opened" in output
        assert "already" not in output


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"data_id": "no-such-data"}, "data id 'no-such-data' not found"),
        ({"data_version": "v9"}, "data version 'v9' not found"),
        ({"env_id": "shopp"}, "set env_gateway.environments.shopp.backend"),
        ({"offered_tools": ["teleport"]}, "has no 'teleport'"),
    ],
)
def test_a_task_that_its_environment_refuses_is_invalid_and_tried_again_with_another_spec(
    tmp_path: Path, tasks: tuple[Path, Path], fields: dict[str, Any], why: str
) -> None:
    key = change(tasks[0], 0, **fields)
    words = (tasks[0], "--solutions", tasks[1], EMBEDDED, "--key", key)
    for _ in range(2):
        code, output = check(tmp_path, *words)
        assert code == 1
        assert f"{key}: invalid: reachable: " in output and why in output
        assert "already" not in output


def test_ctrl_c_keeps_what_was_found_and_the_next_run_goes_on(
    tmp_path: Path, tasks: tuple[Path, Path]
) -> None:
    words = (tasks[0], "--solutions", tasks[1], EMBEDDED, "--concurrency", "1")
    results = tmp_path / "checks.jsonl"
    with start(tmp_path, *words) as process:
        wait_until(lambda: results.exists() and results.stat().st_size)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "tasks are left: run the command again" in output
    kept = len(read_checks(results))
    assert 0 < kept < 6
    with results.open("ab") as file:
        file.write(b'{"key": "cut o')
    code, output = check(tmp_path, *words)
    assert (code, output.splitlines()[0]) == (0, f"{kept} results are in checks.jsonl already")
    assert len(read_checks(results)) == 6


def test_episodes_that_cost_money_are_counted_and_asked_for(
    tmp_path: Path, tasks: tuple[Path, Path]
) -> None:
    spec = tmp_path / "paid.toml"
    spec.write_text('[env_gateway]\nbackend = "fleet"\n[env_gateway.backends.fleet]\n')
    code, output = check(tmp_path, tasks[0], "--env", "shop", spec=spec)
    assert code == 2
    assert "2 episodes will be opened at Fleet, which charges: 2 of shop" in output
    assert "confirm with --yes" in output
    assert not list(read_checks(tmp_path / "checks.jsonl"))
    person, terminal = os.openpty()
    os.write(person, b"n\n")
    with start(tmp_path, tasks[0], "--env", "shop", spec=spec, stdin=terminal) as process:
        output, _ = process.communicate(timeout=60)
    os.close(person)
    os.close(terminal)
    assert (process.returncode, "nothing was checked" in output) == (2, True), output
    code, output = check(tmp_path, tasks[0], "--env", "shop", "--yes", spec=spec)
    assert (code, "confirm with --yes" in output) == (1, False)
    assert "FLEET_API_KEY" in output


def test_files_that_do_not_fit_are_refused(tmp_path: Path, tasks: tuple[Path, Path]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"key": "elsewhere", "calls": []}\n')
    code, output = check(tmp_path, tasks[0], "--solutions", other, EMBEDDED)
    assert (code, "solves none of the tasks" in output) == (2, True)
    code, output = check(tmp_path, tasks[0], "--env", "desk", EMBEDDED)
    assert (code, "has no 'desk', but booking, shop, tracker" in output) == (2, True)
    other.write_text("not a result\n")
    code, output = check(tmp_path, tasks[0], "--out", other, EMBEDDED)
    assert (code, "is it a file of `flotilla data check`?" in output) == (2, True)
