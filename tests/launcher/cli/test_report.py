"""`flotilla report`: one page about a run, or about several next to each other."""

import json
import re
import shutil
import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flotilla_common.domain.attempts import FailureKind
from flotilla_launcher.cli.app import app
from flotilla_launcher.state import Run, RunState
from flotilla_launcher.store.ledger import Ledger
from flotilla_reading.analysis.analysis_files import write_analysis
from flotilla_reading.analysis.run_analysis import FORMAT, analyze_run
from tests.reading.analysis.episode_rows import row, says, write_evaluation
from tests.reading.inspector.made_runs import (
    MadeAttempt,
    conversation,
    make_task,
    open_run,
    run_apart,
)

HOSTILE = "<script>alert(1)</script>"
SPEC: dict[str, Any] = {
    "name": "demo",
    "policy": {"model": "build/tiny-0"},
    "learner": {"steps": 3, "tasks": "tasks.json", "tracking": {"api_key": "canary-key"}},
    "prepare": [{"creates": "tasks.json", "command": [HOSTILE]}],
    "written_by": {"version": "0.1.0", "commit": "ab" * 20},
}


def figures(share: float) -> dict[str, Any]:
    return {
        **{"pass_at_1": share, "pass_at_1_low": share - 0.1, "pass_at_1_high": share + 0.1},
        "avg_turns": 2.5,
    }


async def write_run(runs: Path, run_id: str, lr: float, reward: float) -> None:
    """Write a run of three steps with two evaluations, the second with this reward at four tasks;
    in the first they failed."""
    run = open_run(runs, run_id)
    await run.journal.begin_epoch(1)
    for step, share in ((0, 0.25), (3, 0.75)):
        counts = {"tasks": 18, "missing": 2, "incomplete": 1}
        whole = {**figures(share), **counts, "by_env": {HOSTILE: figures(share)}}
        eval_id = f"during-1-{step}"
        await run.journal.add_evaluation(eval_id, "during", step, {"heldout": whole})
        named = {f"eval/all/{name}": value for name, value in figures(share).items()}
        run.log(step, **named)
    lost = MadeAttempt(conversation(), None, failure=FailureKind.ENV_LOST)
    for number in range(4):
        for step, each in ((0, 0.0), (3, reward)):
            attempts = [MadeAttempt(conversation(), each), lost]
            task = make_task(number)
            await run.add_group(attempts, task=task, eval_id=f"during-1-{step}")
    for step in (1, 2, 3):
        run.log(step, reward__avg_raw_reward=0.2 * step, reward__avg_pass_at_1=0.1 * step)
    alarm = {"state": "raised", "alarm": "signal_ratio", "scope": HOSTILE, "cause": "all pass"}
    run.write("alarms.jsonl", {"step": 2, **alarm, "fix": "harder tasks"})
    run.write("summary.json", {"seconds": {"train": 90.4}, "trajectories": {"trained": 4800}})
    learner = {**SPEC["learner"], "optimizer": {"lr": lr}}
    run.write("spec.json", {**SPEC, "learner": learner})
    await run.journal.close()
    failed = row(says("<done>"), reward=0.0, task_key=HOSTILE)
    write_evaluation(run.folder, 3, [failed])
    write_analysis(run.folder, analyze_run(run.folder, None))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs, and of one that failed before its first step."""
    runs = tmp_path_factory.mktemp("report") / "runs"
    for run_id, lr, reward in (("demo-1", 1e-5, 0.0), ("demo-2", 1e-4, 1.0)):
        run_apart(write_run(runs, run_id, lr, reward))
    store = Ledger(runs / "launcher.sqlite")
    with store.transaction():
        run = Run("demo-3", "demo", {}, state=RunState.FAILED, error="no room on the disk")
        store.begin_run(run, json.dumps(SPEC), 1e9)
        store.save_run(run, [], 1e9 + 65)
    store.close()
    (runs / "demo-3").mkdir()
    (runs / "demo-3" / "spec.json").write_text(json.dumps(SPEC))
    return runs


def report(runs: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *words, "--runs", str(runs)])
    return result.exit_code, result.output


class PageText(HTMLParser):
    """Text, tags and addresses of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.addresses = "", set[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def folder(made: Path) -> Path:
    """The report about one run."""
    code, output = report(made, "demo-1")
    assert code == 0, output
    place = made / "demo-1" / "report"
    names = ("report.md", "report.html", "demo-1.json", "curves.svg")
    assert [Path(line) for line in output.splitlines()] == [place / name for name in names]
    return place


def test_the_page_of_a_run_with_a_warm_start_shows_both_phases(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo-1"
    shutil.copytree(made / "demo-1", run)
    spec = json.loads((run / "spec.json").read_text())
    spec["learner"] |= {"warm_start": {"steps": 2}, "steps": 1}
    (run / "spec.json").write_text(json.dumps(spec))
    with closing(sqlite3.connect(run / "journal.sqlite")) as db, db:
        for step in (1, 2):
            db.execute(
                f"INSERT INTO evals SELECT 'during-1-{step}-b', moment, {step}, results FROM evals"
                " WHERE version = 0"
            )
    code, output = report(tmp_path, "demo-1")
    assert code == 0, output
    text = (run / "report" / "report.md").read_text()
    assert "| mean over tasks | demo-1, step 0 | demo-1, step 2 | demo-1, step 3 |" in text
    assert "| optimizer steps | 3 of 3 |\n| of which imitate | the first 2 |" in text


def test_the_page_has_evaluations_with_intervals_and_ungraded_tasks_next_to_them(
    folder: Path,
) -> None:
    text = (folder / "report.md").read_text()
    assert "## Evaluations on heldout" in text
    assert "| mean over tasks | demo-1, step 0 | demo-1, step 3 |" in text
    assert r"| all, pass@1 | 25.0% \[15.0%, 35.0%\] | 75.0% \[65.0%, 85.0%\] |" in text
    assert "| tasks with a grade | 18 | 18 |\n| tasks without a grade | 2 | 2 |" in text
    assert "| optimizer steps | 3 of 3 |" in text
    assert "| attempts | 4,800 trained |" in text
    assert "all pass. harder tasks" in text
    assert f"git checkout {'ab' * 20}" in text
    assert "## Why attempts fail: demo-1, step 3" in text
    assert "What differs" not in text and "What is missing" not in text


def test_the_html_needs_no_other_file_and_shows_hostile_names_as_text(folder: Path) -> None:
    page = PageText((folder / "report.html").read_text())
    assert "script" not in page.tags
    assert f"{HOSTILE}, pass@1" in page.text and f"signal_ratio of {HOSTILE}" in page.text
    assert all(address.startswith("data:") for address in page.addresses)
    assert sum(address.startswith("data:image/svg+xml;base64,") for address in page.addresses) == 1
    assert "<svg" in (folder / "curves.svg").read_text()


def test_the_spec_next_to_the_page_can_be_run_and_has_no_secret(folder: Path) -> None:
    spec = json.loads((folder / "demo-1.json").read_text())
    assert spec["learner"]["optimizer"] == {"lr": 1e-5}
    assert "written_by" not in spec
    everything = "".join(path.read_text() for path in folder.iterdir())
    assert "canary-key" not in everything


def test_several_runs_stand_next_to_each_other_with_what_differs(
    made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page"
    code, output = report(made, "demo-1", "demo-2", "demo-3", "--out", str(out))
    assert code == 0, output
    text = (out / "report.md").read_text()
    assert "| learner.optimizer.lr | 1e-05 | 0.0001 | none |" in text
    assert "| demo-1: step 3 against step 0 | 4 | +0.000" in text
    assert re.search(
        r"\| demo-2 against demo-1 \| 4 \| \+1\.000 \S+ \S+ \| 4 \| 0 \| 0 \| 0\.1250 \|", text
    )
    assert "| demo-3 against demo-1 | 0 | no task has graded attempts in both |" in text
    assert "| course | demo-1 | demo-2 | demo-3 |" in text
    assert "| state | - | - | failed |" in text
    assert "| error | - | - | no room on the disk |" in text
    assert "| took | - | - | 1 min 5 s |" in text
    assert "| demo-3 | There is no metrics.jsonl" in text
    assert {path.name for path in out.glob("*.json")} == {f"demo-{n}.json" for n in (1, 2, 3)}
    picture = (out / "curves.svg").read_text()
    assert "demo-1, held-out tasks" in picture and "demo-2, held-out tasks" in picture


def test_a_run_that_failed_before_its_first_step_has_a_page_that_says_so(made: Path) -> None:
    code, output = report(made, "demo-3")
    assert code == 0, output
    text = (made / "demo-3" / "report" / "report.md").read_text()
    assert "There is no journal: the run's learner never began." in text
    assert "No evaluation has ended." in text and "No picture: there are no metrics" in text
    assert not (made / "demo-3" / "report" / "curves.svg").exists()


def test_damaged_files_are_named_and_the_rest_is_shown(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo-1"
    shutil.copytree(made / "demo-1", run, ignore=shutil.ignore_patterns("report"))
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f'no line\n{metrics}{{"step": 4, "reward/avg_')
    (run / "summary.json").write_text("{")
    spec = json.loads((run / "spec.json").read_text())
    spec["learner"]["data"] = "gone/manifest.json"
    (run / "spec.json").write_text(json.dumps(spec))
    (run / "journal.sqlite").write_bytes(b"no journal")
    (run / "analysis" / "newest.json").write_text(f'{{"format": {FORMAT}, "step": 3}}')
    code, output = report(tmp_path, "demo-1")
    assert code == 0, output
    text = (run / "report" / "report.md").read_text()
    assert "metrics.jsonl has 1 damaged lines" in text
    assert "The last line of metrics.jsonl is cut off" in text
    assert "summary.json is damaged: cannot read" in text
    assert "The manifest of its data is not here now: cannot read gone/manifest.json" in text
    assert "| optimizer steps | 3 of 3 |" in text
    assert "journal.sqlite cannot be read as a journal" in text
    assert "It cannot be shown (KeyError" in text


def test_results_of_evaluations_that_are_damaged_are_named(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "demo-1"
    shutil.copytree(made / "demo-1", run, ignore=shutil.ignore_patterns("report"))
    with closing(sqlite3.connect(run / "journal.sqlite")) as db:
        db.execute("UPDATE evals SET results = '{'")
        db.commit()
    code, output = report(tmp_path, "demo-1")
    assert code == 0, output
    assert "journal.sqlite is damaged: " in (run / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("demo-1", "demo-2"), 2, "runs with --out"),
        (("demo-9",), 1, "there is no run 'demo-9'"),
    ],
)
def test_what_cannot_be_reported_is_refused(
    made: Path, words: tuple[str, ...], code: int, reason: str
) -> None:
    found, output = report(made, *words)
    assert (found, reason in " ".join(output.split())) == (code, True), output
