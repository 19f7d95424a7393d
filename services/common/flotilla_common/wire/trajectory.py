"""Codec of trajectories as rollouts submit them to the learner, in a header and chunks.

Decoding checks the form only; the learner checks consistency
(`services/learner/flotilla_learner/api/decode.py`)."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any

from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.domain.attempts import AttemptKey, FailureKind
from flotilla_common.domain.trajectory import (
    Counts,
    Facts,
    Media,
    Sequence,
    SequenceOrigin,
    Trajectory,
    wire_arrays,
)
from flotilla_common.wire.enums import FAILURE_KINDS, SEQUENCE_CAUSES, STOP_REASONS
from flotilla_common.wire.trajectory_columns import decode_turns, span_fields, turn_fields

# Bytes of arrays in one message, which keeps the whole message under 1 MiB.
CHUNK_BYTES = 512 * 1024

_NO_GRADE = "NO_GRADE_REASON_"
# The fields of both Counts and its message.
_COUNTS = tuple(field.name for field in fields(Counts))

# Fields of a message and of those within it, by name: a message built from these is built once, not
# copied into the enclosing one.
_Fields = dict[str, Any]


def encode_submission(trajectory: Trajectory) -> Iterator[group_pb.SubmitTrajectoryRequest]:
    """Yield the header, then chunks of sequences, then those of pictures."""
    header: Any = _header_fields(trajectory)
    yield group_pb.SubmitTrajectoryRequest(header=header)
    for index, sequence in enumerate(trajectory.sequences):
        for chunk in _chunk_fields(index, sequence):
            piece: Any = chunk
            yield group_pb.SubmitTrajectoryRequest(chunk=piece)
    for index, data in enumerate(trajectory.pictures.values()):
        for start in range(0, len(data), CHUNK_BYTES):
            part: Any = {"picture_index": index, "data": data[start : start + CHUNK_BYTES]}
            yield group_pb.SubmitTrajectoryRequest(picture=part)


def decode_trajectory(
    header: trajectory_pb2.TrajectoryHeader,
    sequences: tuple[Sequence, ...],
    pictures: Mapping[str, bytes],
) -> Trajectory:
    """Return the trajectory of a header; it has no outcome if the header has none.

    Raises ValueError for an unknown reason of a missing grade, and for incomplete turns."""
    reward, failure, no_grade = _decode_outcome(header)
    judged = header.WhichOneof("outcome") == "to_be_judged"
    return Trajectory(
        key=decode_key(header.key),
        lease_id=header.lease_id,
        sequences=sequences,
        content_digest=header.content_digest,
        reward=reward,
        failure=failure,
        no_grade=no_grade,
        judged=judged,
        detail=header.detail,
        stop_reason=STOP_REASONS.find_member(header.stop_reason),
        partial_reward=header.partial_reward if header.HasField("partial_reward") else None,
        named_rewards=dict(header.named_rewards),
        checks_passed=tuple(header.checks_passed),
        checks_failed=tuple(header.checks_failed),
        suspicion=header.suspicion,
        turns=decode_turns(header.turns),
        counts=_decode_counts(header.counts),
        facts=_decode_facts(header),
        tools=header.tools,
        pictures=pictures,
    )


def _header_fields(trajectory: Trajectory) -> _Fields:
    facts = trajectory.facts
    return {
        "key": _key_fields(trajectory.key),
        "lease_id": trajectory.lease_id,
        "worker_id": facts.worker_id,
        "sequences": [_sequence_fields(sequence) for sequence in trajectory.sequences],
        **_outcome_fields(trajectory),
        "detail": trajectory.detail,
        "stop_reason": trajectory.stop_reason and STOP_REASONS.encode(trajectory.stop_reason),
        "partial_reward": trajectory.partial_reward,
        "checks_passed": trajectory.checks_passed,
        "checks_failed": trajectory.checks_failed,
        "suspicion": trajectory.suspicion,
        "turns": turn_fields(trajectory.turns),
        "counts": _count_fields(trajectory.counts),
        "env_key": facts.env_key,
        "task_key": facts.task_key,
        "env_version": facts.env_version,
        "data_version": facts.data_version,
        "tool_schema_digest": bytes.fromhex(facts.tool_schema_digest),
        "prompt_digest": bytes.fromhex(facts.prompt_digest),
        "instance_id": facts.instance_id,
        "content_digest": trajectory.content_digest,
        "tools": trajectory.tools,
        "pictures": [
            {"sha256": bytes.fromhex(sha256), "size_bytes": len(data)}
            for sha256, data in trajectory.pictures.items()
        ],
    }


def _decode_facts(header: trajectory_pb2.TrajectoryHeader) -> Facts:
    return Facts(
        env_key=header.env_key,
        task_key=header.task_key,
        env_version=header.env_version,
        data_version=header.data_version,
        tool_schema_digest=header.tool_schema_digest.hex(),
        prompt_digest=header.prompt_digest.hex(),
        instance_id=header.instance_id,
        worker_id=header.worker_id,
    )


def _outcome_fields(trajectory: Trajectory) -> _Fields:
    if trajectory.reward is not None:
        # An empty map costs as much as all numbers.
        named = trajectory.named_rewards or None
        return {"reward": trajectory.reward, "named_rewards": named}
    if trajectory.no_grade:
        name = f"{_NO_GRADE}{trajectory.no_grade.upper()}"
        return {"no_grade": trajectory_pb2.NoGradeReason.Value(name)}
    if trajectory.failure is not None:
        return {"failure": FAILURE_KINDS.encode(trajectory.failure)}
    return {"to_be_judged": {}} if trajectory.judged else {}


def _decode_outcome(
    header: trajectory_pb2.TrajectoryHeader,
) -> tuple[float | None, FailureKind | None, str]:
    kind = header.WhichOneof("outcome")
    if kind == "reward":
        return header.reward, None, ""
    if kind == "no_grade":
        name = trajectory_pb2.NoGradeReason.Name(header.no_grade)
        return None, FailureKind.NO_GRADE, name.removeprefix(_NO_GRADE).lower()
    return None, FAILURE_KINDS.find_member(header.failure), ""


def _key_fields(key: AttemptKey) -> _Fields:
    return {
        "group_id": key.group_id,
        "attempt_index": key.attempt_index,
        "try": key.attempt_try,
    }


def decode_key(key: trajectory_pb2.TrajectoryKey) -> AttemptKey:
    return AttemptKey(key.group_id, key.attempt_index, getattr(key, "try"))


def _sequence_fields(sequence: Sequence) -> _Fields:
    return {
        "token_count": len(sequence.token_ids),
        "spans": span_fields(sequence.spans),
        "media": [_media_fields(item) for item in sequence.media],
        "experts": _shape_fields(sequence),
        "messages_bytes": len(sequence.messages),
        "origin": _origin_fields(sequence.origin) if sequence.origin else None,
        "candidates": 0 if sequence.candidates is None else sequence.candidates.shape[1],
    }


def _origin_fields(origin: SequenceOrigin) -> _Fields:
    return {
        "cause": SEQUENCE_CAUSES.encode(origin.cause),
        "parent": origin.parent,
        "shared_tokens": origin.shared,
    }


def _shape_fields(sequence: Sequence) -> _Fields | None:
    if sequence.experts is None:
        return None
    tokens, layers, chosen = sequence.experts.shape
    return {"token_count": tokens, "layers": layers, "chosen": chosen}


def _chunk_fields(index: int, sequence: Sequence) -> Iterator[_Fields]:
    """Yield the arrays in order, filling each message: a message costs more than 100 kB of data."""
    token_ids, logprobs, experts, candidates = (each.tobytes() for each in wire_arrays(sequence))
    media = b"".join(item.content for item in sequence.media)
    arrays = {
        "token_ids": token_ids,
        "logprobs": logprobs,
        "media": media,
        "experts": experts,
        "messages": sequence.messages,
        "candidates": candidates,
    }
    ends = list(accumulate(map(len, arrays.values())))
    begins = (0, *ends)
    for start in range(0, ends[-1], CHUNK_BYTES):
        pieces = {
            name: data[max(0, start - begin) : max(0, start + CHUNK_BYTES - begin)]
            for begin, (name, data) in zip(begins, arrays.items(), strict=False)
        }
        yield {"sequence_index": index, **pieces}


def _media_fields(item: Media) -> _Fields:
    return {
        "sha256": bytes.fromhex(item.sha256),
        "mime": item.mime,
        "grid": item.grid,
        "token_offset": item.token_offset,
        "processor_digest": bytes.fromhex(item.processor_digest),
        "size_bytes": item.size_bytes,
        "sent_bytes": len(item.content),
    }


def decode_media(item: trajectory_pb2.MediaReference, content: bytes) -> Media:
    return Media(
        item.sha256.hex(),
        item.mime,
        tuple(item.grid),
        item.token_offset,
        item.processor_digest.hex(),
        item.size_bytes,
        content,
    )


def _count_fields(counts: Counts) -> _Fields:
    # An empty map costs as much as all numbers.
    return {name: getattr(counts, name) or None for name in _COUNTS}


def _decode_counts(counts: trajectory_pb2.TrajectoryCounts) -> Counts:
    values: dict[str, Any] = {name: getattr(counts, name) for name in _COUNTS}
    for name in ("tool_errors", "parse_messages", "unknown_tools"):
        values[name] = dict(values[name])
    return Counts(**values)
