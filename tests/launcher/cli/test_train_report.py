"""The report at the end of a run."""

import io
import json
import os
from pathlib import Path

import pytest

from flotilla_launcher.cli import train_report
from flotilla_launcher.cli.terminal import Terminal


def test_the_report_shows_before_and_after_and_draws_the_curve(tmp_path: Path) -> None:
    figures = {"pass_at_1": 0.25, "ci95": [0.2, 0.3], "greedy_pass_at_1": 0.0}
    before = {**figures, "by_env": {"shop": 0.5}, "unseen_names": None}
    summary = {"eval": {"before": before, "after": {"pass_at_1": 0.95}}, "seconds": {"train": 9}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    record = {"step": 1, "reward/avg_pass_at_1": 0.5, "policy/kl": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + '\n{"step": 2, "cut')
    train_report.add_total_seconds(tmp_path, 12.34)
    console = Terminal(record=True, width=200, file=io.StringIO())
    train_report.print_report(tmp_path, console)
    text = console.export_text()
    assert "25.0% [20.0%, 30.0%]" in text
    assert "95.0%" in text
    assert "curve.svg" in text
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    seconds = json.loads((tmp_path / "summary.json").read_text())["seconds"]
    assert seconds == {"train": 9, "total": 12.3}


def test_an_evaluation_alone_has_a_column_of_its_own(tmp_path: Path) -> None:
    summary = {"eval": {"before": None, "eval_only": {"pass_at_1": 0.5, "ci95": [0.4, 0.6]}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    console = Terminal(record=True, width=200, file=io.StringIO())
    train_report.print_report(tmp_path, console, evaluated=True)
    text = console.export_text()
    assert "eval only" in text
    assert "50.0% [40.0%, 60.0%]" in text


def test_what_draws_the_curve_starts_programs_without_the_users_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, tool = tmp_path / "seen", tmp_path / "bin" / "fc-list"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nenv >> {seen}\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    # Without a cache of fonts.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLEET_API_KEY", "canary-key")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/avg_pass_at_1": 0.5}\n')
    train_report.draw_curve(run_dir)
    assert "<svg" in (run_dir / "curve.svg").read_text()
    assert "PATH=" in seen.read_text() and "canary-key" not in seen.read_text()
