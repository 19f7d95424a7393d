"""A judge's scores are shown as such: they pass nothing, and neither do they fail."""

import json
import sqlite3
from pathlib import Path

import pytest

from flotilla_common.domain.attempts import AttemptKey, Purpose, StopReason
from flotilla_common.domain.trajectory import Trajectory, content_digest
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_common.run_folder.trajectory_tables import put_trajectory, trajectory_row
from flotilla_learner.group_types import GroupSpec, GroupVerdict
from flotilla_learner.journal.row_codec import put_group
from flotilla_learner.journal.schema import TABLES
from flotilla_learner.journal.verdict_tables import put_verdict
from flotilla_learner.sampling.tasks import Task
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.inspector.queries.group_rows import GroupRow, group_rows, with_tries

KEYS = [AttemptKey("g", index, 0) for index in range(2)]


@pytest.fixture
def db(tmp_path: Path) -> sqlite3.Connection:
    """A journal with one group of two attempts that await a verdict."""
    connection = sqlite3.connect(tmp_path / JOURNAL_FILE, isolation_level=None)
    connection.executescript(TABLES)
    task = Task("t", "env", json.dumps({"key": "t", "prompt": "do it"}))
    put_group(connection, GroupSpec("g", 0, task, Purpose.TRAIN, 2, 1.0), leased=True)
    for key in KEYS:
        made = Trajectory(
            *(key, "lease", (), content_digest(())), judged=True, stop_reason=StopReason.DONE
        )
        put_trajectory(connection, trajectory_row(made), "")
    return connection


def give(db: sqlite3.Connection, scores: dict[int, float] | None) -> GroupRow:
    verdict = GroupVerdict(
        group_id="g",
        scores=scores,
        failure="" if scores else "no JSON",
        model="m",
        request_digest=b"d",
        answer="a",
        calls=1,
        prompt_tokens=1,
        completion_tokens=1,
        seconds=1.0,
    )
    put_verdict(db, verdict, KEYS)
    return with_tries(db, group_rows(db, ["g"])[0])


def found(db: sqlite3.Connection, wanted: AttemptFilter) -> int:
    condition, values = wanted.to_sql()
    sql = f"SELECT count(*) FROM trajectories t JOIN groups g USING (group_id) WHERE {condition}"
    (count,) = db.execute(sql, values).fetchone()
    return count


def test_a_score_of_1_is_no_pass(db: sqlite3.Connection) -> None:
    group = give(db, {0: 1.0, 1: 0.25})
    assert group.judged
    assert group.rewards == (1.0, 0.25)
    assert group.passes == 0
    assert [(row.reward, row.judged, row.passed) for row in group.tries] == [
        (0.25, True, False),
        (1.0, True, False),
    ]
    assert found(db, AttemptFilter(passed=True)) == 0
    assert found(db, AttemptFilter(graded=True)) == 2
    assert found(db, AttemptFilter(least_reward=0.5)) == 1


def test_attempts_wait_for_their_verdict_and_say_so(db: sqlite3.Connection) -> None:
    group = with_tries(db, group_rows(db, ["g"])[0])
    assert all(row.judged and row.reward is None for row in group.tries)
    assert {row.ended for row in group.tries} == {"done"}


def test_without_a_verdict_they_have_no_grade(db: sqlite3.Connection) -> None:
    group = give(db, None)
    assert group.rewards == ()
    assert {(row.reward, row.ended) for row in group.tries} == {(None, "no_grade")}
    details = db.execute("SELECT json_extract(summary, '$.detail') FROM trajectories").fetchall()
    assert details == [("no JSON",)] * 2
