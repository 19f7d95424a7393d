"""A trajectory as rollouts submit it to the learner: header, chunks, end; and back.

What is decoded here is well formed; whether it holds together the learner checks
(`services/learner/api/decode.py`)."""

from collections.abc import Iterator

from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import trajectory_pb2
from services.common.domain.attempts import AttemptKey, FailureKind
from services.common.domain.trajectory import (
    Counts,
    Facts,
    Media,
    Sequence,
    Span,
    Trajectory,
    TurnTiming,
    expert_bytes,
)
from services.common.rpc import to_duration, to_seconds
from services.wire.enums import AUTHORS, FAILURE_KINDS, STOP_REASONS
from services.wire.policy import decode_policy, encode_policy

# Bytes of one array in one message, which stays under 1 MiB with all around it.
CHUNK_BYTES = 512 * 1024

_NO_GRADE = "NO_GRADE_REASON_"


def encode_submission(trajectory: Trajectory) -> Iterator[group_pb.SubmitTrajectoryRequest]:
    """Yield header, chunks and end."""
    yield group_pb.SubmitTrajectoryRequest(header=_encode_header(trajectory))
    for index, sequence in enumerate(trajectory.sequences):
        for chunk in _encode_chunks(index, sequence):
            yield group_pb.SubmitTrajectoryRequest(chunk=chunk)
    end = trajectory_pb2.TrajectoryEnd(content_digest=trajectory.content_digest)
    yield group_pb.SubmitTrajectoryRequest(end=end)


def decode_trajectory(
    header: trajectory_pb2.TrajectoryHeader, sequences: tuple[Sequence, ...], digest: bytes
) -> Trajectory:
    """Return the trajectory of a header; neither reward nor failure is set where that has none.

    Raises ValueError for a reason of no grade that this code does not know."""
    reward, failure, no_grade = _decode_outcome(header)
    return Trajectory(
        key=decode_key(header.key),
        lease_id=header.lease_id,
        sequences=sequences,
        content_digest=digest,
        reward=reward,
        failure=failure,
        no_grade=no_grade,
        detail=header.detail,
        stop_reason=STOP_REASONS.find_member(header.stop_reason),
        partial_reward=header.partial_reward if header.HasField("partial_reward") else None,
        checks_passed=tuple(header.checks_passed),
        checks_failed=tuple(header.checks_failed),
        suspicion=header.suspicion,
        turns=tuple(_decode_turn(turn) for turn in header.turns),
        counts=_decode_counts(header.counts),
        facts=_decode_facts(header),
    )


def _encode_header(trajectory: Trajectory) -> trajectory_pb2.TrajectoryHeader:
    facts = trajectory.facts
    header = trajectory_pb2.TrajectoryHeader(
        key=_encode_key(trajectory.key),
        lease_id=trajectory.lease_id,
        worker_id=facts.worker_id,
        sequences=[_encode_sequence(sequence) for sequence in trajectory.sequences],
        detail=trajectory.detail,
        partial_reward=trajectory.partial_reward,
        checks_passed=trajectory.checks_passed,
        checks_failed=trajectory.checks_failed,
        suspicion=trajectory.suspicion,
        turns=[_encode_turn(turn) for turn in trajectory.turns],
        counts=_encode_counts(trajectory.counts),
        env_key=facts.env_key,
        task_key=facts.task_key,
        env_version=facts.env_version,
        data_version=facts.data_version,
        tool_schema_digest=bytes.fromhex(facts.tool_schema_digest),
        prompt_digest=bytes.fromhex(facts.prompt_digest),
        instance_id=facts.instance_id,
    )
    if trajectory.stop_reason is not None:
        header.stop_reason = STOP_REASONS.encode(trajectory.stop_reason)
    _encode_outcome(header, trajectory)
    return header


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


def _encode_outcome(header: trajectory_pb2.TrajectoryHeader, trajectory: Trajectory) -> None:
    if trajectory.reward is not None:
        header.reward = trajectory.reward
    elif trajectory.no_grade:
        name = f"{_NO_GRADE}{trajectory.no_grade.upper()}"
        header.no_grade = trajectory_pb2.NoGradeReason.Value(name)
    elif trajectory.failure is not None:
        header.failure = FAILURE_KINDS.encode(trajectory.failure)


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


def _encode_key(key: AttemptKey) -> trajectory_pb2.TrajectoryKey:
    # `try` is a word of Python's, so the field cannot be named as an argument.
    fields = {
        "group_id": key.group_id,
        "attempt_index": key.attempt_index,
        "try": key.attempt_try,
    }
    return trajectory_pb2.TrajectoryKey(**fields)  # pyright: ignore[reportArgumentType]


def decode_key(key: trajectory_pb2.TrajectoryKey) -> AttemptKey:
    return AttemptKey(key.group_id, key.attempt_index, getattr(key, "try"))


def _encode_sequence(sequence: Sequence) -> trajectory_pb2.SequenceHeader:
    return trajectory_pb2.SequenceHeader(
        token_count=len(sequence.token_ids),
        spans=[_encode_span(span) for span in sequence.spans],
        media=[_encode_media(item) for item in sequence.media],
        experts=_encode_shape(sequence),
    )


def _encode_shape(sequence: Sequence) -> trajectory_pb2.RoutedExperts | None:
    if sequence.experts is None:
        return None
    tokens, layers, chosen = sequence.experts.shape
    return trajectory_pb2.RoutedExperts(token_count=tokens, layers=layers, chosen=chosen)


def _encode_chunks(index: int, sequence: Sequence) -> Iterator[trajectory_pb2.SequenceChunk]:
    tokens = sequence.token_ids.astype("<i4").tobytes()
    for start in range(0, len(tokens), CHUNK_BYTES):
        piece = tokens[start : start + CHUNK_BYTES]
        yield trajectory_pb2.SequenceChunk(sequence_index=index, token_ids=piece)
    logprobs = sequence.logprobs.astype("<f4").tobytes()
    for start in range(0, len(logprobs), CHUNK_BYTES):
        piece = logprobs[start : start + CHUNK_BYTES]
        yield trajectory_pb2.SequenceChunk(sequence_index=index, logprobs=piece)
    media = b"".join(item.content for item in sequence.media)
    for start in range(0, len(media), CHUNK_BYTES):
        piece = media[start : start + CHUNK_BYTES]
        yield trajectory_pb2.SequenceChunk(sequence_index=index, media=piece)
    experts = expert_bytes(sequence)
    for start in range(0, len(experts), CHUNK_BYTES):
        piece = experts[start : start + CHUNK_BYTES]
        yield trajectory_pb2.SequenceChunk(sequence_index=index, experts=piece)


def _encode_span(span: Span) -> trajectory_pb2.Span:
    return trajectory_pb2.Span(
        author=AUTHORS.encode(span.author),
        length=span.length,
        policy=None if span.policy is None else encode_policy(span.policy),
        temperature=span.temperature,
    )


def decode_span(span: trajectory_pb2.Span) -> Span | None:
    """Return the span; None when it has no author."""
    author = AUTHORS.find_member(span.author)
    if author is None:
        return None
    return Span(
        author,
        span.length,
        decode_policy(span.policy) if span.HasField("policy") else None,
        span.temperature if span.HasField("temperature") else None,
    )


def _encode_media(item: Media) -> trajectory_pb2.MediaReference:
    return trajectory_pb2.MediaReference(
        sha256=bytes.fromhex(item.sha256),
        mime=item.mime,
        grid=item.grid,
        token_offset=item.token_offset,
        processor_digest=bytes.fromhex(item.processor_digest),
        size_bytes=item.size_bytes,
        sent_bytes=len(item.content),
    )


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


def _encode_turn(turn: TurnTiming) -> trajectory_pb2.TurnTiming:
    return trajectory_pb2.TurnTiming(
        generate=to_duration(turn.generate_s),
        tools=to_duration(turn.tools_s),
        prompt_tokens=turn.prompt_tokens,
        generated_tokens=turn.generated_tokens,
        reward=turn.reward,
        thinking_tokens=turn.thinking_tokens,
    )


def _decode_turn(turn: trajectory_pb2.TurnTiming) -> TurnTiming:
    reward = turn.reward if turn.HasField("reward") else None
    return TurnTiming(
        to_seconds(turn.generate),
        to_seconds(turn.tools),
        turn.prompt_tokens,
        turn.generated_tokens,
        reward,
        turn.thinking_tokens,
    )


def _encode_counts(counts: Counts) -> trajectory_pb2.TrajectoryCounts:
    return trajectory_pb2.TrajectoryCounts(
        turns=counts.turns,
        tool_calls=counts.tool_calls,
        tool_errors=counts.tool_errors,
        parse_errors=counts.parse_errors,
        repeats=counts.repeats,
        open=to_duration(counts.open_s),
        grade=to_duration(counts.grade_s),
        tools=counts.tools,
        malformed_turns=counts.malformed_turns,
        parse_messages=counts.parse_messages,
        unknown_tools=counts.unknown_tools,
    )


def _decode_counts(counts: trajectory_pb2.TrajectoryCounts) -> Counts:
    return Counts(
        turns=counts.turns,
        tool_calls=counts.tool_calls,
        tool_errors=dict(counts.tool_errors),
        parse_errors=counts.parse_errors,
        repeats=counts.repeats,
        open_s=to_seconds(counts.open),
        grade_s=to_seconds(counts.grade),
        tools=counts.tools,
        malformed_turns=counts.malformed_turns,
        parse_messages=dict(counts.parse_messages),
        unknown_tools=dict(counts.unknown_tools),
    )
