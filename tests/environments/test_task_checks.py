"""The tasks of the shipped environments pass the checks of `flotilla data check`, on each interface
that serves them."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.tasks.task_checks import Outcome, read_checks
from flotilla_environments.fleet_booking.app import KEY
from flotilla_environments.gsm8k.__main__ import RULES
from flotilla_environments.gsm8k.__main__ import main as write_questions
from flotilla_environments.tasks import main as write_tasks
from flotilla_launcher.cli.data_check import CheckOptions, check_data
from flotilla_reading.play.solutions import Solution, SolutionCall, format_solutions
from tests.environments.fleet_booking.task_file import (
    DRAWN_REFERENCE,
    OVERLOOKED,
    SOLUTIONS,
    TASKS,
    needs_tasks,
    open_task,
)
from tests.environments.fleet_booking.test_solutions_gateway import calls_of
from tests.reading.data.check.planted import trust
from tests.support.repository import ROOT

SPEC = ROOT / "deploy/runs/local.toml"


def verdicts(folder: Path, *overrides: str, limit: int | None = None) -> dict[str, Outcome]:
    """Check the tasks of a folder with its solutions."""
    options = CheckOptions(
        *(SPEC, folder / "tasks.json", folder / "solutions.jsonl", folder / "checks.jsonl"),
        key=None,
        envs=(),
        limit=limit,
        concurrency=4,
        again=False,
        yes=False,
    )
    check_data(options, overrides)
    return {key: found.verdict for key, found in read_checks(options.out).items()}


def write(folder: Path, split: str, count: int) -> None:
    files = ("--out", str(folder / "tasks.json"), "--solutions", str(folder / "solutions.jsonl"))
    assert write_tasks(["--split", split, "--count", str(count), *files]) == 0


def write_problems(folder: Path, rule: str, count: int) -> None:
    files = ("--out", str(folder / "tasks.json"), "--solutions", str(folder / "solutions.jsonl"))
    words = ("--from", "arithmetic", "--count", str(count), "--rule", rule)
    assert write_questions([*words, *files]) == 0


@pytest.mark.parametrize("backend", ["mcp", "fleet"])
def test_a_sample_of_the_apps_tasks_is_valid_on_each_interface(
    tmp_path: Path, backend: str
) -> None:
    write(tmp_path, "heldout", 60)
    found = verdicts(tmp_path, f"--env_gateway.backend={backend}", limit=3)
    assert list(found.values()) == [Outcome.VALID] * 3


@pytest.mark.parametrize("rule", RULES)
def test_questions_are_valid(tmp_path: Path, rule: str) -> None:
    write_problems(tmp_path, rule, 60)
    found = verdicts(tmp_path, "--env_gateway.backend=embedded", limit=6)
    assert list(found.values()) == [Outcome.VALID] * 6


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("split", ["train", "heldout", "unseen_names"])
def test_many_tasks_of_the_apps_are_valid(tmp_path: Path, split: str) -> None:
    write(tmp_path, split, 90)
    found = verdicts(tmp_path, "--env_gateway.backend=embedded")
    assert list(found.values()) == [Outcome.VALID] * 90


def record(short: str) -> Solution:
    made = calls_of(open_task(TASKS[short]), short)
    calls = tuple(SolutionCall(name, arguments) for name, arguments in made)
    return Solution(TASKS[short]["key"], calls, "done")


@needs_tasks
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_users_own_booking_tasks_are_valid_but_for_those_that_are_known_not_to_be(
    tmp_path: Path,
) -> None:
    chosen = {short: TASKS[short] for short in SOLUTIONS.keys() & TASKS}
    tasks: list[dict[str, Any]] = list(chosen.values())
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    (tmp_path / "solutions.jsonl").write_bytes(format_solutions(map(record, chosen)))
    trust(tasks, tmp_path / "digests")
    digests = f"--env_gateway.verifiers.digests={tmp_path}/digests"
    found = verdicts(tmp_path, "--env_gateway.backend=embedded", digests)
    assert {task["env_id"] for task in tasks} == {KEY}
    faulty = {key for key, verdict in found.items() if verdict is not Outcome.VALID}
    known = (DRAWN_REFERENCE | OVERLOOKED) & chosen.keys()
    assert faulty == {chosen[short]["key"] for short in known}
