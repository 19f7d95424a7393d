"""Analyses that the launcher starts once the episodes of an evaluation are dumped."""

import asyncio
import json
import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.control import evaluation_analyses
from flotilla_launcher.control.evaluation_analyses import EvaluationAnalyses, analyzed_runs
from flotilla_launcher.state import Outcome, Run, RunState
from flotilla_launcher.store.ledger import Ledger
from tests.reading.analysis.episode_rows import row, says, write_evaluation

RUN = "demo-20261128-120000"


@pytest.fixture
def store(tmp_path: Path) -> Generator[Ledger]:
    with closing(Ledger(tmp_path / "launcher.sqlite")) as opened:
        yield opened


def begin(store: Ledger, runs: Path, **launcher: Any) -> Path:
    (runs / RUN / "logs").mkdir(parents=True)
    with store.transaction():
        spec = json.dumps({"launcher": launcher})
        store.begin_run(Run(RUN, "demo", {"learner": 1}), spec, 1_700_000_000.0, {})
    write_evaluation(runs / RUN, 0, [row(says("<done>"))])
    return runs / RUN


def log_of(run_dir: Path) -> str:
    return (run_dir / "logs" / "analysis.log").read_text()


async def test_an_evaluation_is_analyzed_once(store: Ledger, tmp_path: Path) -> None:
    run_dir = begin(store, tmp_path)
    analyses = EvaluationAnalyses(tmp_path, store)
    await analyses.analyze_pending()
    assert json.loads((run_dir / "analysis" / "newest.json").read_bytes())["step"] == 0
    said = log_of(run_dir)
    await analyses.analyze_pending()
    assert log_of(run_dir) == said
    # The run's successor repeats the evaluation.
    path = run_dir / "evals" / "step_0" / "aggregated_results.jsonl"
    later = path.stat().st_mtime + 60
    os.utime(path, (later, later))
    await analyses.analyze_pending()
    assert log_of(run_dir) == said * 2


async def test_the_last_evaluation_of_a_run_that_has_ended_is_analyzed(
    store: Ledger, tmp_path: Path
) -> None:
    run_dir = begin(store, tmp_path)
    analyses = EvaluationAnalyses(tmp_path, store)
    await analyses.analyze_pending()
    write_evaluation(run_dir, 4, [row(says("<done>"))])
    stored = store.get_run(RUN)
    assert stored is not None
    ended = replace(stored.run, state=RunState.COMPLETED, outcome=Outcome.COMPLETED)
    with store.transaction():
        store.save_run(ended, [], 1_700_000_100.0)
    assert not store.list_unended()
    await analyses.analyze_pending()
    assert (run_dir / "analysis" / "step_4.html").exists()


async def test_a_spec_can_do_without(store: Ledger, tmp_path: Path) -> None:
    run_dir = begin(store, tmp_path, analysis=False)
    await EvaluationAnalyses(tmp_path, store).analyze_pending()
    assert not (run_dir / "analysis").exists()


async def test_that_the_readers_are_not_installed_is_said_once(
    store: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = begin(store, tmp_path)
    monkeypatch.setattr(evaluation_analyses, "_READERS", "no_such_readers")
    analyses = EvaluationAnalyses(tmp_path, store)
    await analyses.analyze_pending()
    await analyses.analyze_pending()
    assert log_of(run_dir) == "no analysis: no_such_readers is not installed here\n"


async def test_an_analysis_that_fails_is_not_repeated(store: Ledger, tmp_path: Path) -> None:
    run_dir = begin(store, tmp_path)
    (run_dir / "evals" / "step_0" / "tracker.jsonl").write_text("no JSON\n")
    analyses = EvaluationAnalyses(tmp_path, store)
    await analyses.analyze_pending()
    said = log_of(run_dir)
    assert "error" in said.lower()
    await analyses.analyze_pending()
    assert log_of(run_dir) == said


async def test_a_launcher_that_ends_waits_for_what_is_left_but_not_long(
    store: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = begin(store, tmp_path)
    async with analyzed_runs(tmp_path):
        pass
    assert (run_dir / "analysis" / "step_0.html").exists()
    write_evaluation(run_dir, 4, [row(says("<done>"))])
    monkeypatch.setattr(evaluation_analyses, "_GRACE_S", 0.01)
    async with asyncio.timeout(10):
        async with analyzed_runs(tmp_path):
            pass
    assert not (run_dir / "analysis" / "step_4.html").exists()
