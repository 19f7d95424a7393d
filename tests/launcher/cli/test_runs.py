"""`flotilla runs`: an experiment log of runs, and their comparison."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flotilla_launcher.cli.app import app
from flotilla_launcher.run_progress import Progress
from flotilla_launcher.state import Run, RunState
from flotilla_launcher.store.ledger import Ledger

# Learning rate and newest held-out pass@1 of each run, oldest first.
RUNS: dict[str, tuple[float, float | None]] = {
    "demo-1": (1e-5, 0.5),
    "demo-2": (1e-4, 0.75),
    "demo-3": (1e-5, None),
    "demo-4": (1e-5, float("nan")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    store = Ledger(folder / "launcher.sqlite")
    with store.transaction():
        for number, (run_id, (rate, held_out)) in enumerate(RUNS.items()):
            spec = {
                "name": "demo",
                "learner": {"optimizer": {"lr": rate}, "tasks": "a.json", "hub_token": run_id},
            }
            run = Run(run_id, "demo", {}, state=RunState.COMPLETED)
            store.begin_run(run, json.dumps(spec), 1e9 + number)
            store.save_run(run, [], 1e9 + number + 60)
            found = {} if held_out is None else {"eval/all/pass_at_1": held_out}
            progress = Progress(step=3, total_steps=3, metrics={**found, "policy/entropy": 0.25})
            store.save_progress(run_id, progress)
    store.close()
    return folder


def invoke(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["runs", *words, "--runs", str(folder)])
    return result.exit_code, result.output


def listed(folder: Path, *words: str) -> list[str]:
    code, output = invoke(folder, *words)
    assert code == 0, output
    return [line.split()[0] for line in output.splitlines() if line.startswith("demo-")]


def test_without_options_it_is_the_list_of_status(folder: Path) -> None:
    status = CliRunner().invoke(app, ["status", "--runs", str(folder)])
    assert invoke(folder) == (0, status.output)
    assert listed(folder) == ["demo-4", "demo-3", "demo-2", "demo-1"]


def test_columns_are_newest_metrics_and_keys_of_the_spec(folder: Path) -> None:
    code, output = invoke(folder, "--columns", "policy/entropy, learner.optimizer.lr", "-n", "2")
    assert code == 0
    head, first, second, more = output.splitlines()
    assert head.split()[-2:] == ["policy/entropy", "learner.optimizer.lr"]
    assert [line.split()[-2:] for line in (first, second)] == [["0.25", "1e-05"]] * 2
    assert "2 more: --after demo-3 continues" in more


def test_conditions_compare_numbers_and_texts_of_the_spec(folder: Path) -> None:
    assert listed(folder, "--where", "learner.optimizer.lr=0.0001") == ["demo-2"]
    both = ("--where", "learner.optimizer.lr=1e-5", "--where", "learner.tasks=a.json")
    assert listed(folder, *both) == ["demo-4", "demo-3", "demo-1"]
    assert listed(folder, *both, "-n", "1", "--after", "demo-3") == ["demo-1"]
    assert listed(folder, "--where", "learner.steps=3") == []


def test_runs_without_a_number_come_last_whatever_the_order(folder: Path) -> None:
    name = "eval/all/pass_at_1"
    assert listed(folder, "--sort", name) == ["demo-2", "demo-1", "demo-4", "demo-3"]
    assert listed(folder, "--sort", f"-{name}") == ["demo-1", "demo-2", "demo-4", "demo-3"]
    code, output = invoke(folder, "--sort", name, "-n", "1")
    assert code == 0
    assert "3 more: --count 0 shows all" in output.splitlines()[-1]


def test_a_column_that_no_run_has_is_named_with_one_that_is_near(folder: Path) -> None:
    output = invoke(folder, "--columns", "eval/al/pass_at_1")[1]
    assert "the key eval/al/pass_at_1; did you mean eval/all/pass_at_1?" in output
    assert "docs/metrics.md names" in invoke(folder, "--columns", "zzz")[1]


def test_a_comparison_shows_differing_keys_and_metrics_but_no_secret(folder: Path) -> None:
    code, output = invoke(folder, "demo-1", "demo-2")
    assert code == 0
    lines = [line.split() for line in output.splitlines()]
    assert ["learner.optimizer.lr", "1e-05", "0.0001"] in lines
    assert ["eval/all/pass_at_1", "0.5", "0.75"] in lines
    assert "hub_token" not in output, "it hides that secrets differ, and their values"
    assert "tasks" not in output, "equal keys are left out"
    assert "the specs are equal" in invoke(folder, "demo-1", "demo-3")[1]


def test_json_has_the_columns_and_the_differing_keys_and_is_json(folder: Path) -> None:
    def parse(*words: str) -> Any:
        code, output = invoke(folder, *words, "--json")
        assert code == 0, output
        return json.loads(output, parse_constant=pytest.fail)

    columns = ("--columns", "eval/all/pass_at_1,learner.optimizer.lr,learner.steps")
    newest, *_ = parse(*columns)["runs"]
    expected = {"eval/all/pass_at_1": None, "learner.optimizer.lr": 1e-5, "learner.steps": None}
    assert (newest["run_id"], newest["columns"]) == ("demo-4", expected)
    compared = parse("demo-1", "demo-2")
    assert compared["differing"] == {"learner.optimizer.lr": [1e-5, 1e-4]}
    assert [each["columns"]["eval/all/pass_at_1"] for each in compared["runs"]] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--where", "learner.optimizer.lr"), "write KEY=VALUE"),
        (("demo-1",), "`flotilla status demo-1` shows one"),
        (("demo-1", "demo-9"), "there is no run 'demo-9'"),
        (("demo-1", "demo-2", "--sort", "x"), "no effect with named runs"),
    ],
)
def test_what_cannot_be_listed_is_refused(
    folder: Path, words: tuple[str, ...], reason: str
) -> None:
    code, output = invoke(folder, *words)
    assert code != 0
    assert reason in " ".join(output.replace("│", " ").split())
