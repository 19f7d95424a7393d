"""`flotilla show --tasks`: the tasks that a run parked and quarantined, and why."""

from pathlib import Path

from flotilla_learner.journal.curriculum_tables import CurriculumSnapshot
from flotilla_learner.journal.store import open_journal
from flotilla_learner.sampling.group_signal import GroupOutcome
from tests.support.curriculum import Run, config, tasks_of
from tests.support.launcher import run_cli_here


async def test_tasks_that_are_left_out_are_listed_with_the_reason(tmp_path: Path) -> None:
    run = Run(tasks_of(shop=5), config(difficulty={"enabled": True}), seed=0, window=5)
    journal = open_journal(tmp_path / "solo")
    run.curriculum.condemn_task("shop3", "the gateway refuses it: BAD_TASK: [no] prompt")
    for _ in range(2):
        change = run.learn([GroupOutcome("shop1", [1.0, 1.0]), GroupOutcome("shop2", [1.0, 0.0])])
        await journal.end_groups([], snapshot=CurriculumSnapshot(change, ()))
    await journal.close()
    code, output = await run_cli_here("show", "solo", "--runs", str(tmp_path), "--tasks")
    assert code == 0, output
    assert output.splitlines() == [
        "quarantined  shop  shop3  the gateway refuses it: BAD_TASK: [no] prompt",
        "solved       shop  shop1  solved: pass rate 1.00 after 2 groups",
        "2 tasks are parked or quarantined",
    ]


async def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    code, output = await run_cli_here("show", "nowhere", "--runs", str(tmp_path), "--tasks")
    assert code != 0
    assert "there are no runs in" in output
