"""Demonstrations that a step imitated, as attempts of that step: dumps and the inspector read them
as they read attempts that a run has played itself."""

import re
from itertools import groupby

import numpy as np

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Facts, Sequence, Trajectory
from flotilla_common.episodes.demonstrations import Demonstration, episode_name
from flotilla_common.episodes.episode_rows import StoredAttempt

PURPOSE = "imitation"
# Before the name of the episode, in `detail`.
IMITATES = "imitates "
_GROUP = re.compile(r"imitated-(\d{1,9})")


def imitated_key(step: int, number: int) -> AttemptKey:
    """Return the name of sequence `number`, from 0, of a step that imitates. No group that is
    played has such an id."""
    return AttemptKey(f"imitated-{step}", number, 0)


def imitating_step(group_id: str) -> int | None:
    """Return the step of a sequence that was imitated; None for attempts that were played."""
    match = _GROUP.fullmatch(group_id)
    return int(match[1]) if match else None


def imitated_attempt(step: int, number: int, imitated: Demonstration) -> StoredAttempt:
    """Return sequence `number` of a step as an attempt; `detail` names the episode that it is of.

    The logprobs of whoever wrote its tokens are unknown: NaN."""
    source = f"{imitated.source}/{episode_name(imitated.key)}"
    trained = int(imitated.trained.sum())
    sequence = Sequence(imitated.token_ids, _spans(imitated), np.full(trained, np.nan, np.float32))
    trajectory = Trajectory(
        *(imitated_key(step, number), "", (sequence,), b""),
        reward=imitated.reward,
        detail=f"{IMITATES}{source}",
        facts=Facts(task_key=imitated.task_key),
    )
    return StoredAttempt(
        trajectory,
        env_key="",
        task_key=imitated.task_key,
        purpose=PURPOSE,
        eval_id="",
        step=step,
        why_not="",
        received=0.0,
    )


def _spans(imitated: Demonstration) -> tuple[Span, ...]:
    """Return the authors of the tokens: before the first trained one all are of the prompt."""
    spans: list[Span] = []
    for trained, run in groupby(imitated.trained.tolist()):
        author = Author.POLICY if trained else Author.ENVIRONMENT if spans else Author.PROMPT
        spans.append(Span(author, len(list(run))))
    return tuple(spans)
