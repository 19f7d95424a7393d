"""Rows of dumps: an attempt as one JSON object, in the reference's fields and ours."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Media, Sequence, Trajectory, is_picture
from flotilla_common.episodes.episode_text import Decode, EpisodeText, read_episode
from flotilla_common.process.own_version import own_version
from flotilla_common.run_folder.token_stats import SequenceKey, SequenceStats
from flotilla_common.run_folder.trajectory_codec import outcome_fields

# The reference's only class of environments: episodes that the gateway plays.
ENV_CLASS = "fleet_task"
# Decimals in text; the journal and the token statistics keep full precision.
_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """An attempt from the journal, with the fate of its group.

    `step` is the step that counted it, or the evaluated version. `why_not` is the reason why it was
    not trained on, "" if it was, or was evaluated."""

    trajectory: Trajectory
    env_key: str
    task_key: str
    purpose: str
    eval_id: str
    step: int | None
    why_not: str
    received: float


def attempt_row(
    attempt: StoredAttempt, stats: Mapping[SequenceKey, SequenceStats], decode: Decode
) -> dict[str, Any]:
    """Return the row of an attempt; the trainer's values are null if `stats` lacks them."""
    trajectory = attempt.trajectory
    episode = read_episode(trajectory, decode)
    return {
        **_reference_fields(attempt, episode),
        **_identity(attempt),
        **outcome_fields(trajectory),
        "dropped": attempt.why_not,
        "facts": asdict(trajectory.facts),
        "messages": message_rows(episode, trajectory),
        "sequences": [
            _sequence_row(sequence, stats.get((trajectory.key, index)))
            for index, sequence in enumerate(trajectory.sequences)
        ],
    }


def message_rows(episode: EpisodeText, trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the messages of the last sequence, with the hashes of the pictures that they show."""
    rows: list[dict[str, Any]] = []
    for message in episode.messages:
        media = [trajectory.sequences[-1].media[place] for place in message.media]
        shown = [item.sha256 for item in media if is_picture(item.mime)]
        rows.append(message.to_json() | ({"pictures": shown} if shown else {}))
    return rows


def key_of_row(row: Mapping[str, Any]) -> AttemptKey:
    return AttemptKey(row["group_id"], row["attempt_index"], row["attempt_try"])


def sequence_of_row(row: Mapping[str, Any]) -> Sequence:
    """Return a dumped sequence: its tokens, authors and logprobs, NaN where they are unknown."""
    spans = tuple(Span(Author(author), length) for author, length, *_ in row["spans"])
    logprobs = np.array([np.nan if each is None else each for each in row["logprobs"]], np.float32)
    return Sequence(np.array(row["token_ids"], np.int32), spans, logprobs)


def _reference_fields(attempt: StoredAttempt, episode: EpisodeText) -> dict[str, Any]:
    trajectory = attempt.trajectory
    return {
        "input_prompt": episode.prompt,
        "output_response": episode.response,
        "score": _token_scores(trajectory),
        "stop_reason": str(trajectory.end_reason),
        "env_class": ENV_CLASS,
        "env_extras": {**asdict(trajectory.facts), "task_key": attempt.task_key},
        "data_source": attempt.env_key,
        "num_screenshots": sum(len(sequence.pictures) for sequence in trajectory.sequences),
        "timestamp": attempt.received,
    }


def _identity(attempt: StoredAttempt) -> dict[str, Any]:
    key = attempt.trajectory.key
    return {
        "step": attempt.step,
        "purpose": attempt.purpose,
        "eval_id": attempt.eval_id,
        "env_key": attempt.env_key,
        "task_key": attempt.task_key,
        "group_id": key.group_id,
        "attempt_index": key.attempt_index,
        "attempt_try": key.attempt_try,
        "written_by": str(own_version()),
    }


def _token_scores(trajectory: Trajectory) -> list[float] | None:
    """Return 0 for each token of the response and the reward for its last one, as the reference
    does; None without a grade."""
    if trajectory.reward is None:
        return None
    count = sum(span.length for span in trajectory.spans if span.author is not Author.PROMPT)
    return [0.0] * (count - 1) + [trajectory.reward] if count else []


def _sequence_row(sequence: Sequence, stats: SequenceStats | None) -> dict[str, Any]:
    return {
        "token_ids": sequence.token_ids.tolist(),
        "spans": [_span_row(span) for span in sequence.spans],
        "logprobs": _numbers(sequence.logprobs),
        "pictures": [_picture_row(item) for item in sequence.pictures],
        "trainer_logprobs": _numbers(stats.logprobs) if stats else None,
        "advantages": _numbers(stats.advantages) if stats else None,
        "entropy": _numbers(stats.entropy) if stats else None,
        "weights": _numbers(stats.weights) if stats else None,
        "trained": stats.trained if stats else None,
        "why_not": stats.why_not if stats else None,
    }


def _picture_row(item: Media) -> dict[str, Any]:
    return {
        "sha256": item.sha256,
        "mime": item.mime,
        "grid": list(item.grid),
        "token_offset": item.token_offset,
        "size_bytes": item.size_bytes,
    }


def _span_row(span: Span) -> list[Any]:
    policy = f"{span.policy.run_epoch}:{span.policy.version}" if span.policy else None
    return [span.author, span.length, policy, span.temperature]


def _numbers(values: NDArray[Any]) -> list[float | None]:
    """Return rounded numbers, None for non-finite ones, which JSON lacks."""
    rounded = np.round(values.astype(np.float64), _DECIMALS)
    numbers: list[float | None] = rounded.tolist()
    if np.isfinite(rounded).all():
        return numbers
    return [
        value if known else None
        for value, known in zip(numbers, np.isfinite(rounded).tolist(), strict=True)
    ]
