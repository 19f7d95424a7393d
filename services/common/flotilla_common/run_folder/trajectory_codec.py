"""Conversion of a trajectory to its journal row and back.

The journal holds what people may read as JSON (`summary_json`), and the arrays as one blob
(`array_bytes`): for each sequence its int32 token ids, then its float32 logprobs, both
little-endian, then the kept part of its media, then the ids of its experts, then its messages, then
the int32 ids of its candidates, if it has any: rows without their number of columns have none.
Tokens and experts that a sequence shares with its parent are only the parent's."""

import hashlib
import json
import math
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from flotilla_common.domain.attempts import AttemptKey, FailureKind, StopReason
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import (
    Candidates,
    Counts,
    Experts,
    Facts,
    Media,
    Sequence,
    SequenceCause,
    SequenceOrigin,
    Trajectory,
    TurnTiming,
    join_parent,
    wire_arrays,
)


def record_digest(trajectory: Trajectory) -> bytes:
    """Return a digest of arrays and outcome that distinguishes contents under one key."""
    outcome: list[Any] = [trajectory.reward, trajectory.failure, trajectory.stop_reason]
    if trajectory.named_rewards:
        outcome.append(sorted(trajectory.named_rewards.items()))
    return hashlib.sha256(trajectory.content_digest + json.dumps(outcome).encode()).digest()


def outcome_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Return how the attempt went, as plain values for people and programs."""
    return {
        "reward": trajectory.reward,
        "partial_reward": trajectory.partial_reward,
        "named_rewards": dict(trajectory.named_rewards),
        "judged": trajectory.judged,
        "failure": trajectory.failure,
        "no_grade": trajectory.no_grade,
        "detail": trajectory.detail,
        "checks_passed": trajectory.checks_passed,
        "checks_failed": trajectory.checks_failed,
        "suspicion": trajectory.suspicion,
        "turns": [turn._asdict() for turn in trajectory.turns],
        "counts": asdict(trajectory.counts),
    }


def summary_json(trajectory: Trajectory) -> str:
    """Encode everything but the arrays as JSON."""
    return json.dumps(
        {
            "lease_id": trajectory.lease_id,
            "no_grade": trajectory.no_grade,
            "judged": trajectory.judged,
            "detail": trajectory.detail,
            "stop_reason": trajectory.stop_reason,
            "partial_reward": trajectory.partial_reward,
            "named_rewards": dict(trajectory.named_rewards),
            "checks_passed": trajectory.checks_passed,
            "checks_failed": trajectory.checks_failed,
            "suspicion": trajectory.suspicion,
            "turns": trajectory.turns,
            "counts": _named_fields(trajectory.counts),
            "facts": _named_fields(trajectory.facts),
            "sequences": [_sequence_row(s) for s in trajectory.sequences],
            "experts": [_expert_row(s) for s in trajectory.sequences],
            "media": [[_media_row(item) for item in s.media] for s in trajectory.sequences],
        }
    )


def array_bytes(trajectory: Trajectory) -> bytes:
    """Encode the arrays alone."""
    parts: list[bytes | memoryview] = []
    for sequence in trajectory.sequences:
        token_ids, logprobs, experts, candidates = wire_arrays(sequence)
        parts += (token_ids, logprobs, *(item.content for item in sequence.media))
        parts += (experts, sequence.messages, candidates)
    return b"".join(parts)


def restore_trajectory(
    key: AttemptKey,
    reward: float | None,
    failure: str | None,
    digest: bytes,
    text: str,
    arrays: bytes | None,
) -> Trajectory:
    """Restore a trajectory from its journal row; without sequences if `arrays` was pruned."""
    data = json.loads(text)
    rows, media = (data["sequences"], data["media"]) if arrays is not None else ([], [])
    return Trajectory(
        key=key,
        lease_id=data["lease_id"],
        sequences=_rows_to_sequences(rows, media, data["experts"][: len(rows)], arrays or b""),
        content_digest=digest,
        reward=reward,
        failure=FailureKind(failure) if failure else None,
        no_grade=data["no_grade"],
        judged=data.get("judged", False),  # Not in format 8.
        detail=data["detail"],
        stop_reason=StopReason(data["stop_reason"]) if data["stop_reason"] else None,
        partial_reward=data["partial_reward"],
        named_rewards=data.get("named_rewards", {}),  # Not in format 7.
        checks_passed=tuple(data["checks_passed"]),
        checks_failed=tuple(data["checks_failed"]),
        suspicion=data["suspicion"],
        turns=tuple(TurnTiming(*row) for row in data["turns"]),
        counts=Counts(**data["counts"]),
        facts=Facts(**data["facts"]),
    )


def _named_fields(value: Counts | Facts) -> dict[str, Any]:
    """Return the fields by name, as `asdict` does, without copying every value."""
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _sequence_row(sequence: Sequence) -> dict[str, Any]:
    row: dict[str, Any] = {
        "tokens": len(sequence.token_ids) - sequence.shared,
        "spans": [_span_row(span) for span in sequence.spans],
        "messages": len(sequence.messages),
    }
    if sequence.origin is not None:
        row["origin"] = asdict(sequence.origin)
    if sequence.candidates is not None:
        row["candidates"] = sequence.candidates.shape[1]
    return row


def _row_to_origin(row: dict[str, Any] | None) -> SequenceOrigin | None:
    return (
        SequenceOrigin(SequenceCause(row["cause"]), row["parent"], row["shared"]) if row else None
    )


def _media_row(item: Media) -> dict[str, Any]:
    row = asdict(item)
    return {**row, "content": len(row.pop("content"))}


def _row_to_media(item: dict[str, Any], arrays: bytes, offset: int) -> Media:
    content = arrays[offset : offset + item["content"]]
    values: dict[str, Any] = {**item, "grid": tuple(item["grid"]), "content": content}
    return Media(**values)


def _expert_row(sequence: Sequence) -> list[Any] | None:
    """Return the bytes per id, and the shape of what is stored."""
    experts = sequence.experts
    if experts is None:
        return None
    return [experts.itemsize, max(len(experts) - sequence.shared, 0), *experts.shape[1:]]


def _row_to_experts(row: list[Any] | None, arrays: bytes, offset: int) -> Experts | None:
    if row is None:
        return None
    size, *shape = row
    count = math.prod(shape)
    return np.frombuffer(arrays, f"<u{size}", count=count, offset=offset).reshape(shape)


def _row_to_candidates(
    columns: int | None, tokens: int, arrays: bytes, offset: int
) -> Candidates | None:
    if columns is None:
        return None
    found = np.frombuffer(arrays, "<i4", count=tokens * columns, offset=offset)
    return found.reshape(tokens, columns)


def _span_row(span: Span) -> list[Any]:
    policy = span.policy
    named = [policy.run_epoch, policy.version, policy.fingerprint.hex()] if policy else None
    return [span.author, span.length, named, span.temperature]


def _row_to_span(row: list[Any]) -> Span:
    author, length, named, temperature = row
    policy = PolicyId(named[0], named[1], bytes.fromhex(named[2])) if named else None
    return Span(Author(author), length, policy, temperature)


def _rows_to_sequences(
    rows: list[dict[str, Any]],
    media: list[list[dict[str, Any]]],
    experts: list[list[Any] | None],
    arrays: bytes,
) -> tuple[Sequence, ...]:
    found: list[Sequence] = []
    offset = 0
    for row, items, expert_row in zip(rows, media, experts, strict=True):
        spans = tuple(_row_to_span(span) for span in row["spans"])
        written = sum(span.length for span in spans if span.author is Author.POLICY)
        token_ids = np.frombuffer(arrays, dtype="<i4", count=row["tokens"], offset=offset)
        offset += token_ids.nbytes
        logprobs = np.frombuffer(arrays, dtype="<f4", count=written, offset=offset)
        offset += logprobs.nbytes
        kept: list[Media] = []
        for item in items:
            kept.append(_row_to_media(item, arrays, offset))
            offset += len(kept[-1].content)
        chosen = _row_to_experts(expert_row, arrays, offset)
        offset += chosen.nbytes if chosen is not None else 0
        messages = arrays[offset : offset + row["messages"]]
        offset += len(messages)
        candidates = _row_to_candidates(row.get("candidates"), written, arrays, offset)
        offset += candidates.nbytes if candidates is not None else 0
        origin = _row_to_origin(row.get("origin"))
        if origin and origin.parent is not None:
            token_ids, chosen = join_parent(found[origin.parent], origin.shared, token_ids, chosen)
        sequence = (token_ids, spans, logprobs, tuple(kept), chosen, messages, origin, candidates)
        found.append(Sequence(*sequence))
    return tuple(found)
