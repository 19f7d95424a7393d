"""`summary.json`: what a run achieved, and how long it took. Fractions, not percents."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.learner.run.eval_report import MAIN_SET

SUMMARY_FILE = "summary.json"


def eval_summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """One evaluation: the main set's figures, and pass@1 of the sets `greedy` and
    `unseen_names` where they were evaluated."""
    main = report.get(MAIN_SET, {})
    by_env = {env: row.get("pass_at_1") for env, row in main.get("by_env", {}).items()}
    return {
        "pass_at_1": main.get("pass_at_1"),
        "ci95": main.get("ci95"),
        "greedy_pass_at_1": report.get("greedy", {}).get("pass_at_1"),
        "by_env": by_env,
        "unseen_names": report.get("unseen_names", {}).get("pass_at_1"),
        "tasks": main.get("tasks", 0),
        "missing": sum(int(row.get("missing", 0)) for row in report.values()),
    }


def write_summary(
    run_dir: Path,
    evals: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float | None],
    *,
    steps: int,
    seed: int,
    accounts: Mapping[str, int],
) -> None:
    """Replace the summary in one step; `evals` are reports by moment."""
    summary = {
        "eval": {moment: eval_summary(report) for moment, report in evals.items()},
        "seconds": dict(seconds),
        "steps": steps,
        "seed": seed,
        "trajectories": dict(accounts),
    }
    partial = run_dir / f"{SUMMARY_FILE}.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, run_dir / SUMMARY_FILE)
