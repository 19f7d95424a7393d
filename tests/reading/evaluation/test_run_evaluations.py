"""Evaluations that a run has made, from a journal."""

from pathlib import Path

import pytest

from flotilla_common.domain.attempts import FailureKind
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_reading.evaluation.evaluated_attempts import EvaluationError, rewards_by_task
from flotilla_reading.evaluation.run_evaluations import list_evaluations, read_evaluation
from tests.reading.inspector.made_runs import (
    MadeAttempt,
    conversation,
    make_task,
    open_run,
    run_apart,
)

GOOD, BAD = MadeAttempt(conversation(3), 1.0), MadeAttempt(conversation(2), 0.0)
LOST = MadeAttempt(conversation(1), None, failure=FailureKind.ENV_LOST)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = open_run(tmp_path_factory.mktemp("evaluated") / "runs")

    async def make() -> None:
        await run.journal.begin_epoch(1)
        await run.add_group([GOOD, BAD], version=0)
        for eval_id, moment, version in (("before-1-0", "before", 0), ("after-1-20", "after", 20)):
            for number in range(2):
                attempts = [GOOD if version or number else BAD, LOST]
                task = make_task(100 + number)
                await run.add_group(attempts, task=task, eval_id=eval_id, version=version)
            await run.journal.add_evaluation(eval_id, moment, version, {})
        await run.add_group([BAD], task=make_task(100), eval_id="during-1-25", version=25)
        await run.journal.close()

    run_apart(make())
    return run.folder


def test_finished_evaluations_are_listed_in_their_order(run_dir: Path) -> None:
    found = [(each.moment, each.step) for each in list_evaluations(run_dir)]
    assert found == [("before", 0), ("after", 20)]


def test_the_attempts_of_an_evaluation_are_read_with_those_that_have_no_grade(
    run_dir: Path,
) -> None:
    newest, attempts = read_evaluation(run_dir)
    assert newest.eval_id == "after-1-20"
    assert rewards_by_task(attempts) == {"booking-100": [1.0], "booking-101": [1.0]}
    assert [each.no_grade for each in attempts if each.reward is None] == ["env_lost"] * 2
    assert {each.env_key for each in attempts} == {"booking"}
    _, before = read_evaluation(run_dir, 0)
    assert rewards_by_task(before) == {"booking-100": [0.0], "booking-101": [1.0]}


def test_an_evaluation_that_is_not_there_is_named_with_those_that_are(
    run_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError, match="no evaluation of step 25; it has those of: 0, 20"):
        read_evaluation(run_dir, 25)
    with pytest.raises(EvaluationError, match="no attempts at the set 'greedy'"):
        read_evaluation(run_dir, 20, "greedy")
    with pytest.raises(EvaluationError, match="cannot be read as a journal"):
        read_evaluation(tmp_path)
    (tmp_path / JOURNAL_FILE).write_text("nothing")
    with pytest.raises(EvaluationError, match="cannot be read as a journal"):
        list_evaluations(tmp_path)
