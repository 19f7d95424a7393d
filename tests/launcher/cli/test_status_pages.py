"""`flotilla status` of more runs than fit on a page: nothing is left out in silence."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.api.run_pages import list_page
from flotilla_launcher.cli.app import app
from flotilla_launcher.state import Cleanup, Cost, Outcome, Run, RunState
from flotilla_launcher.store.ledger import Ledger

MANY = 1_501
DAY_S = 86400.0
# 2026-01-01, a run a day.
BEGIN_S = 1_767_225_600.0


def run_id_of(number: int) -> str:
    return f"demo-{number:04d}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have ended, every hundredth as failed, every second of another spec."""
    folder = tmp_path_factory.mktemp("runs")
    store = Ledger(folder / "launcher.sqlite")
    with store.transaction():
        for number in range(MANY):
            failed = number % 100 == 0
            run = Run(
                run_id_of(number),
                "demo" if number % 2 else "other",
                {},
                state=RunState.FAILED if failed else RunState.COMPLETED,
                outcome=Outcome.FAILED if failed else Outcome.COMPLETED,
                cleanup=Cleanup.VERIFIED,
                cost=Cost(accrued=1234.5) if number == MANY - 1 else Cost(),
            )
            at = BEGIN_S + number * DAY_S
            store.begin_run(replace(run), "{}", at, {})
            store.save_run(run, [], at + 60.0)
    store.close()
    return folder


def invoke(runs: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["status", *words, "--runs", str(runs)])
    return result.exit_code, result.output


def status(runs: Path, *words: str) -> list[str]:
    code, output = invoke(runs, *words)
    assert code == 0, output
    return output.splitlines()


def listed(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("demo-")]


def test_the_last_line_names_how_many_more_and_what_shows_them(runs: Path) -> None:
    lines = status(runs)
    newest = [run_id_of(number) for number in range(MANY - 1, MANY - 101, -1)]
    assert listed(lines) == newest
    assert lines[-1].startswith(f"1,401 more: --after {newest[-1]} continues, --count 0 shows all")
    assert "COST" in lines[0] and "$1,234.50" in lines[1] and " - " in lines[2]


def test_pages_continue_where_the_last_ended_until_all_were_shown(runs: Path) -> None:
    seen: list[str] = []
    words: list[str] = []
    while True:
        lines = status(runs, "--count", "700", *words)
        seen += listed(lines)
        found = re.search(r"--after (\S+)", lines[-1])
        if found is None:
            break
        words = ["--after", found[1]]
    assert seen == [run_id_of(number) for number in reversed(range(MANY))]
    everything = status(runs, "--count", "0")
    assert (listed(everything), "more" in everything[-1]) == (seen, False)


def test_filters_choose_by_state_name_and_time_among_all_runs(runs: Path) -> None:
    failed = status(runs, "--state", "failed")
    assert listed(failed) == [run_id_of(number) for number in range(1500, -1, -100)]
    assert status(runs, "--state", "failed", "--state", "running") == failed
    assert listed(status(runs, "--name", "demo", "-n", "1")) == [run_id_of(1499)]
    assert listed(status(runs, "--name", "o*r", "-n", "1")) == [run_id_of(1500)]
    since = status(runs, "--since", "2026-01-01T12:00", "--name", "other", "--count", "0")
    assert listed(since)[-1] == run_id_of(2)
    assert listed(status(runs, "--since", "2030-03-01", "--state", "stopped")) == []


def test_an_old_run_is_found_by_its_id_and_json_has_the_rest(runs: Path) -> None:
    assert (status(runs, run_id_of(0)))[0] == f"{run_id_of(0)}  failed"
    answer = json.loads("\n".join(status(runs, "--json", "-n", "2")))
    assert ([run["run_id"] for run in answer["runs"]], answer["more"]) == (
        [run_id_of(1500), run_id_of(1499)],
        1499,
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--after", "demo-9999"), "there is no run 'demo-9999'"),
        (("--since", "yesterday"), "write an age such as 12h or 7d"),
        (("--state", "lost"), "'lost' is not one of"),
        (("newest", "--name", "demo"), "choose among all runs"),
    ],
)
def test_what_cannot_be_chosen_is_refused(runs: Path, words: tuple[str, ...], reason: str) -> None:
    code, output = invoke(runs, *words)
    assert code != 0
    assert reason in " ".join(output.replace("│", " ").split())


def test_a_page_has_at_most_a_thousand_runs_and_an_unknown_state_is_that_of_none(
    runs: Path,
) -> None:
    store = Ledger(runs / "launcher.sqlite")
    page = list_page(store, runs, pb.ListRunsRequest())
    assert (len(page.runs), page.more) == (1_000, MANY - 1_000)
    states: list[pb.RunState.ValueType] = [99]  # pyright: ignore[reportAssignmentType]
    assert not list_page(store, runs, pb.ListRunsRequest(states=states)).runs
    store.close()
