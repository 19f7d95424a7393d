"""A sample is scored again up to where other weights took over, with all that belongs to its
tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence, Trajectory, content_digest
from flotilla_learner.groups.graded_attempts import AttemptRecord
from flotilla_learner.guard.rescored_samples import load_samples

OLD, NEW = PolicyId(1, 0), PolicyId(1, 1)


def make_trajectory() -> Trajectory:
    """Two tokens by one policy, then one of the environment, and two by the next policy."""
    spans = (
        Span(Author.PROMPT, 2),
        Span(Author.POLICY, 2, OLD, 0.5),
        Span(Author.ENVIRONMENT, 1),
        Span(Author.POLICY, 2, NEW, 0.5),
    )
    ids = np.arange(7, dtype=np.int32)
    candidates = np.stack([ids[[2, 3, 5, 6]], np.full(4, 9, np.int32)], 1)
    held = (Sequence(ids, spans, -np.ones(4, np.float32), candidates=candidates),)
    key = AttemptKey("g", 0, 0)
    return Trajectory(key, "l", held, content_digest(held), 1.0, stop_reason=StopReason.DONE)


async def test_candidates_end_with_the_tokens_of_the_weights_that_began() -> None:
    made = make_trajectory()

    async def load_trajectories(keys: list[AttemptKey]) -> list[Trajectory]:
        return [made for _ in keys]

    journal: Any = SimpleNamespace(load_trajectories=load_trajectories)
    record = AttemptRecord(
        made, policy_tokens=4, total_tokens=7, oldest_version=0, newest_version=1
    )
    (found,) = await load_samples(journal, iter([record]), 1, epoch=None, tokens=100)
    row = found.sequence
    assert row.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert row.policy_mask.sum() == 2
    assert row.candidates is not None
    assert row.candidates.tolist() == [[2, 9], [3, 9]]
