"""One finished or failed try as the learner keeps it, and its form in the journal.

The journal holds what a person may want to read as JSON (`summary_json`) and the arrays as one
blob (`array_bytes`): for each sequence its int32 token ids, then its float32 logprobs, both
little-endian."""

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.learner.types import (
    AttemptKey,
    Author,
    FailureKind,
    PolicyId,
    Sequence,
    Span,
    StopReason,
)

PASS_REWARD = 1.0


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """Times of one turn, and its tokens."""

    generate_s: float
    tools_s: float
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of what happened in one attempt; `tool_errors` by the gateway's outcome names."""

    turns: int = 0
    tool_calls: int = 0
    tool_errors: Mapping[str, int] = field(default_factory=dict[str, int])
    parse_errors: int = 0
    repeats: int = 0
    open_s: float = 0.0
    grade_s: float = 0.0
    # Tools that were offered, and turns with a malformed call.
    tools: int = 0
    malformed_turns: int = 0
    # What was wrong with malformed calls, and names of tools that there are not: a few of each.
    parse_messages: Mapping[str, int] = field(default_factory=dict[str, int])
    unknown_tools: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Media:
    """A reference to an image that the policy saw."""

    sha256: str
    mime: str
    grid: tuple[int, ...]
    token_offset: int
    processor_digest: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Circumstances of an attempt: what it ran on and against; digests in hex."""

    env_key: str = ""
    task_key: str = ""
    env_version: str = ""
    data_version: str = ""
    tool_schema_digest: str = ""
    prompt_digest: str = ""
    instance_id: str = ""
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One try at one attempt. Exactly one of `reward` and `failure` is set (I12)."""

    key: AttemptKey
    lease_id: str
    sequences: tuple[Sequence, ...]
    content_digest: bytes
    reward: float | None = None
    failure: FailureKind | None = None
    # Why the grade is not known, when `failure` is NO_GRADE.
    no_grade: str = ""
    detail: str = ""
    stop_reason: StopReason | None = None
    partial_reward: float | None = None
    checks_passed: tuple[str, ...] = ()
    checks_failed: tuple[str, ...] = ()
    # Results that the verifier printed and the policy may have written; they counted for nothing.
    suspicion: str = ""
    turns: tuple[TurnTiming, ...] = ()
    counts: Counts = Counts()
    facts: Facts = Facts()
    media: tuple[tuple[Media, ...], ...] = ()

    @property
    def policies(self) -> tuple[PolicyId, ...]:
        """Policies that wrote any of it, in order of appearance, with repeats."""
        return tuple(
            span.policy
            for sequence in self.sequences
            for span in sequence.spans
            if span.policy is not None
        )

    @property
    def policy_tokens(self) -> int:
        return sum(len(sequence.logprobs) for sequence in self.sequences)


def policy_mask(sequence: Sequence) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask that is True on the tokens that a policy wrote, shape [tokens]."""
    by_policy = [span.author is Author.POLICY for span in sequence.spans]
    lengths = [span.length for span in sequence.spans]
    return np.repeat(np.array(by_policy, dtype=np.bool_), lengths)


def content_digest(sequences: Items[Sequence]) -> bytes:
    """SHA-256 over token id bytes and then logprob bytes, sequence by sequence."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(sequence.token_ids.astype("<i4").tobytes())
        digest.update(sequence.logprobs.astype("<f4").tobytes())
    return digest.digest()


def record_digest(trajectory: Trajectory) -> bytes:
    """Return a digest of arrays and outcome that tells two contents under one key apart."""
    outcome = [trajectory.reward, trajectory.failure, trajectory.stop_reason]
    return hashlib.sha256(trajectory.content_digest + json.dumps(outcome).encode()).digest()


def summary_json(trajectory: Trajectory) -> str:
    """Encode everything but the arrays as JSON."""
    counts = trajectory.counts
    return json.dumps(
        {
            "lease_id": trajectory.lease_id,
            "no_grade": trajectory.no_grade,
            "detail": trajectory.detail,
            "stop_reason": trajectory.stop_reason,
            "partial_reward": trajectory.partial_reward,
            "checks_passed": trajectory.checks_passed,
            "checks_failed": trajectory.checks_failed,
            "suspicion": trajectory.suspicion,
            "turns": [
                [turn.generate_s, turn.tools_s, turn.prompt_tokens, turn.generated_tokens]
                for turn in trajectory.turns
            ],
            "counts": {name: _to_plain(getattr(counts, name)) for name in Counts.__slots__},
            "facts": {name: getattr(trajectory.facts, name) for name in Facts.__slots__},
            "sequences": [
                {"tokens": len(s.token_ids), "spans": [_span_row(span) for span in s.spans]}
                for s in trajectory.sequences
            ],
            "media": [
                [{name: getattr(item, name) for name in Media.__slots__} for item in items]
                for items in trajectory.media
            ],
        }
    )


def array_bytes(trajectory: Trajectory) -> bytes:
    """Encode the arrays alone."""
    parts: list[bytes] = []
    for sequence in trajectory.sequences:
        parts.append(sequence.token_ids.astype("<i4").tobytes())
        parts.append(sequence.logprobs.astype("<f4").tobytes())
    return b"".join(parts)


def restore_trajectory(
    key: AttemptKey,
    reward: float | None,
    failure: str | None,
    digest: bytes,
    text: str,
    arrays: bytes | None,
) -> Trajectory:
    """Restore a trajectory from its journal row; without sequences when `arrays` was pruned."""
    data = json.loads(text)
    rows = data["sequences"] if arrays is not None else []
    return Trajectory(
        key=key,
        lease_id=data["lease_id"],
        sequences=_rows_to_sequences(rows, arrays or b""),
        content_digest=digest,
        reward=reward,
        failure=FailureKind(failure) if failure else None,
        no_grade=data["no_grade"],
        detail=data["detail"],
        stop_reason=StopReason(data["stop_reason"]) if data["stop_reason"] else None,
        partial_reward=data["partial_reward"],
        checks_passed=tuple(data["checks_passed"]),
        checks_failed=tuple(data["checks_failed"]),
        suspicion=data.get("suspicion", ""),
        turns=tuple(TurnTiming(*row) for row in data["turns"]),
        counts=Counts(**data["counts"]),
        facts=Facts(**data["facts"]),
        media=tuple(tuple(_row_to_media(item) for item in items) for items in data["media"]),
    )


def _row_to_media(item: dict[str, Any]) -> Media:
    return Media(
        item["sha256"],
        item["mime"],
        tuple(item["grid"]),
        item["token_offset"],
        item["processor_digest"],
    )


def _to_plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _span_row(span: Span) -> list[Any]:
    policy = span.policy
    named = [policy.run_epoch, policy.version, policy.fingerprint.hex()] if policy else None
    return [span.author, span.length, named, span.temperature]


def _row_to_span(row: list[Any]) -> Span:
    author, length, named, temperature = row
    policy = PolicyId(named[0], named[1], bytes.fromhex(named[2])) if named else None
    return Span(Author(author), length, policy, temperature)


def _rows_to_sequences(rows: list[dict[str, Any]], arrays: bytes) -> tuple[Sequence, ...]:
    found: list[Sequence] = []
    offset = 0
    for row in rows:
        spans = tuple(_row_to_span(span) for span in row["spans"])
        written = sum(span.length for span in spans if span.author is Author.POLICY)
        token_ids = np.frombuffer(arrays, dtype="<i4", count=row["tokens"], offset=offset)
        offset += token_ids.nbytes
        logprobs = np.frombuffer(arrays, dtype="<f4", count=written, offset=offset)
        offset += logprobs.nbytes
        found.append(Sequence(token_ids, spans, logprobs))
    return tuple(found)
