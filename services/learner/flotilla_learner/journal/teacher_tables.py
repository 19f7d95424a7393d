"""Rows of `teacher_scores`: a teacher's logprobs of the attempts of a plan. A step that is replayed
trains on the same numbers, whatever the teacher would say now.

A row is compared with its digest whenever it is read."""

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_learner.types import TeacherScores

# One for each sequence of an attempt.
AttemptScores = Sequence[TeacherScores]

_BY_KEY = "WHERE group_id = ? AND attempt_index = ? AND try = ?"


def put_scores(db: sqlite3.Connection, key: AttemptKey, scores: AttemptScores) -> None:
    """Add the scores of an attempt, in place of any that no plan has used."""
    payload = _encode_scores(scores)
    digest = hashlib.sha256(payload).digest()
    row = (key.group_id, key.attempt_index, key.attempt_try, digest, payload)
    db.execute("INSERT OR REPLACE INTO teacher_scores VALUES (?, ?, ?, ?, ?)", row)


def scores_of(
    db: sqlite3.Connection, keys: Iterable[AttemptKey]
) -> dict[AttemptKey, AttemptScores]:
    """Load the scores of attempts. Raises JournalError if any are missing or damaged."""
    found: dict[AttemptKey, AttemptScores] = {}
    for key in keys:
        where = (key.group_id, key.attempt_index, key.attempt_try)
        sql = f"SELECT digest, payload FROM teacher_scores {_BY_KEY}"
        row = db.execute(sql, where).fetchone()
        if row is None or hashlib.sha256(row[1]).digest() != row[0]:
            raise JournalError(
                f"the teacher's scores of {key} are {'damaged' if row else 'missing'}: restore the"
                " journal from a copy, or start a new run"
            )
        found[key] = _decode_scores(row[1])
    return found


# Who restores or reads a run from a store may have a launcher only, without this package.
def _encode_scores(scores: AttemptScores) -> bytes:
    from safetensors.numpy import save

    arrays: dict[str, NDArray[np.generic]] = {}
    for index, each in enumerate(scores):
        arrays[f"{index}.logprobs"] = each.logprobs.astype(np.float32)
        arrays[f"{index}.top_ids"] = each.top_ids.astype(np.int32)
        arrays[f"{index}.top_logprobs"] = each.top_logprobs.astype(np.float32)
    return save(arrays)


def _decode_scores(payload: bytes) -> AttemptScores:
    from safetensors.numpy import load

    arrays: Mapping[str, NDArray[np.generic]] = load(payload)
    return tuple(
        TeacherScores(
            arrays[f"{index}.logprobs"].astype(np.float32, copy=False),
            arrays[f"{index}.top_ids"].astype(np.int32, copy=False),
            arrays[f"{index}.top_logprobs"].astype(np.float32, copy=False),
        )
        for index in range(len(arrays) // 3)
    )
