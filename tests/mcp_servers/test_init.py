"""`flotilla init` on public MCP servers: the tasks that it makes of each are valid. All but two
take long, and run by `pytest -m "mcp_servers and slow" tests/mcp_servers/test_init.py`."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from flotilla_common.tasks.task_checks import Outcome, read_checks
from tests.mcp_servers.public_servers import SERVERS, PublicServer
from tests.support.launcher import forged_command

# Beside others on two cores.
pytestmark = [pytest.mark.mcp_servers, pytest.mark.timeout(900)]

TASKS, HELDOUT = 8, 4
# Of these, no state can be seen or changed: their tasks ask what they answer.
BY_ANSWER = ("everything", "time", "calculator")


def flotilla(folder: Path, *words: str) -> tuple[int, str]:
    command = forged_command("-m", "flotilla_launcher.cli.app", *words)
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    assert "Traceback (most recent call last)" not in done.stdout, done.stdout
    return done.returncode, done.stdout


def options_of(server: PublicServer, folder: Path) -> list[str]:
    words = ["--mcp", shlex.join(server.command), "--tasks", str(TASKS)]
    for name, value in server.env.items():
        words += ["--env", f"{name}={value}"]
    for tool in server.read_only_tools:
        words += ["--read-only", tool]
    if server.fill is not None:
        state = folder / "state"
        state.mkdir()
        server.fill(state)
        words += ["--state", str(state)]
    return words


@pytest.mark.parametrize(
    "name",
    [
        *("filesystem", "time"),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("memory", "sqlite", "git", "everything", "calculator")
        ),
    ],
)
def test_the_tasks_of_a_public_server_are_valid_and_not_trivial(name: str, tmp_path: Path) -> None:
    code, output = flotilla(tmp_path, "init", "own", *options_of(SERVERS[name], tmp_path))
    assert code == 0, output
    own, checks = tmp_path / "own", tmp_path / "checks.jsonl"
    tasks = [
        json.loads(line)
        for part in ("train", "heldout")
        for line in (own / f"tasks/{part}.jsonl").read_text().splitlines()
    ]
    (own / "all.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    known = "solutions.jsonl"
    words = ("run.toml", "all.jsonl", "--solutions", known, "--out", str(checks))
    _, said = flotilla(own, "data", "check", *words)
    found = read_checks(checks)
    valid = [each for each in found.values() if each.verdict is Outcome.VALID]
    assert len(found) == len(tasks), said
    assert len(valid) >= 0.95 * len(tasks)
    assert all(each.checks["noop"].outcome is Outcome.VALID for each in found.values())
    by_answer = ["answer" in task["metadata"] for task in tasks]
    assert set(by_answer) == {name in BY_ANSWER}
    if name in ("filesystem", "memory", "sqlite"):
        assert len(tasks) == TASKS + HELDOUT
