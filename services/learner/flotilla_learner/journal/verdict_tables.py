"""Rows of `verdicts`: what a judge said about a group, written together with what its attempts get
from it. A resumed run asks about none of these groups again."""

import json
import sqlite3
import time
from collections.abc import Sequence

from flotilla_common.domain.attempts import JUDGE_FAILED, AttemptKey
from flotilla_common.run_folder.trajectory_tables import put_outcome
from flotilla_learner.group_types import GroupVerdict

_INSERT = "INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def put_verdict(db: sqlite3.Connection, verdict: GroupVerdict, keys: Sequence[AttemptKey]) -> None:
    """Add a group's only verdict, and write it into its attempts. Raises DamagedRecordError."""
    scores = verdict.scores
    written = None if scores is None else json.dumps(scores)
    row = (verdict.group_id, written, verdict.failure, verdict.model, verdict.request_digest)
    cost = (verdict.calls, verdict.prompt_tokens, verdict.completion_tokens, verdict.seconds)
    db.execute(_INSERT, (*row, verdict.answer, *cost, time.time()))
    for key in keys:
        if scores is None:
            put_outcome(db, key, None, JUDGE_FAILED, verdict.failure)
        else:
            put_outcome(db, key, scores[key.attempt_index], "", "")


def count_calls(db: sqlite3.Connection) -> int:
    """Return how many answers all verdicts cost."""
    return int(db.execute("SELECT coalesce(sum(calls), 0) FROM verdicts").fetchone()[0])
