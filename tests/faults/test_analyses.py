"""A run analyzes its evaluations by itself, also the last, which comes with its end."""

import json
from collections.abc import Callable

import pytest

from tests.faults.harness import FaultRun


@pytest.mark.slow
async def test_a_run_analyzes_each_evaluation(new_run: Callable[..., FaultRun]) -> None:
    run = new_run(learner={"steps": 2})
    await run.train()
    assert await run.exit() == 0, run.output
    await run.check_end(2)
    folder = run.folder / "analysis"
    names = {path.name for path in folder.iterdir()}
    assert names >= {f"step_{step}.{form}" for step in (0, 2) for form in ("md", "html", "json")}
    analysis = json.loads((folder / "newest.json").read_bytes())
    assert (analysis["first_step"], analysis["step"]) == (0, 2)
    assert [each["after"]["tasks"] for each in analysis["before_after"]] == [1, 1]
    said = (run.folder / "logs" / "analysis.log").read_text()
    assert "error" not in said.lower()
