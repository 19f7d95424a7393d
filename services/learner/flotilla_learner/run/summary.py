"""`summary.json`: a run's results and times. Fractions, not percents."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.domain.eval_groups import MAIN_SET
from flotilla_common.files.durable_files import replace_file
from flotilla_learner.journal.row_codec import count_fates
from flotilla_learner.journal.schema import RUN_ID
from flotilla_learner.journal.store import Journal
from flotilla_learner.run.run_clock import RunClock
from flotilla_learner.run_files.run_identity import SUMMARY_FILE


def eval_summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise one evaluation: the main set's figures, and pass@1 of the sets `greedy` and
    `unseen_names` if evaluated."""
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


class RunSummary:
    """Writes the summary of one run, with times over all of its starts."""

    def __init__(self, run_dir: Path, seed: int, clock: RunClock, journal: Journal) -> None:
        self._run_dir = run_dir
        self._seed = seed
        self._clock = clock
        self._journal = journal

    async def write_summary(self, evals: Mapping[str, Mapping[str, Any]], *, steps: int) -> None:
        """Replace the summary atomically; `evals` are reports by eval id."""
        await self._journal.set_meta({"seconds": self._clock.seconds})
        by_moment = {eval_id.split("-")[0]: report for eval_id, report in evals.items()}
        summary = {
            "run_id": (await self._journal.read_meta())[RUN_ID],
            "eval": {moment: eval_summary(report) for moment, report in by_moment.items()},
            "seconds": self._clock.seconds,
            "steps": steps,
            "seed": self._seed,
            "trajectories": await self._journal.run_read(count_fates),
        }
        text = json.dumps(summary, indent=2) + "\n"
        replace_file(self._run_dir / SUMMARY_FILE, text.encode())
