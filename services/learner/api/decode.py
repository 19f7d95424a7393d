"""Conversion of protobuf into the learner's own types. Everything is checked on the way."""

import hashlib
import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla.learner.v1 import policy_pb2, trajectory_pb2
from services.common.domain.attempts import AttemptKey, FailureKind, StopReason
from services.common.domain.policy import PolicyId
from services.common.domain.trajectory import (
    Author,
    Counts,
    Facts,
    Media,
    Sequence,
    Span,
    Trajectory,
    TurnTiming,
)
from services.common.rpc import to_seconds

_MAX_SEQUENCES = 256
_MAX_TURNS = 4096
# Of all sequences together; a turn has a few.
_MAX_SPANS = 4 * _MAX_TURNS
_MAX_DETAIL = 2000
# Of the keys of one map of counts, and of each.
_MAX_NAMED, _MAX_NAME = 8, 200
MAX_REWARD = 1e6
_MIN_LOGPROB = -1e4


class MalformedRequestError(ValueError):
    """The message contradicts itself or the contract."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits of a token sequence."""

    vocab_size: int
    max_tokens: int


class TrajectoryAssembler:
    """Assembler of the parts of one submission. Raises MalformedRequestError."""

    def __init__(self, limits: TokenLimits) -> None:
        self._limits = limits
        self._header: trajectory_pb2.TrajectoryHeader | None = None
        self._token_ids: list[bytearray] = []
        self._logprobs: list[bytearray] = []
        self._received = 0
        self._expected = 0
        self._end: bytes | None = None

    def add_part(self, part: groups_pb.SubmitTrajectoryRequest) -> None:
        """Take the next message of the stream."""
        kind = part.WhichOneof("part")
        if self._end is not None:
            raise MalformedRequestError(f"{kind} after the end")
        if kind == "header" and self._header is None:
            self._read_header(part.header)
        elif kind == "chunk" and self._header is not None:
            self._append_chunk(part.chunk)
        elif kind == "end" and self._header is not None:
            self._end = part.end.content_digest
        else:
            raise MalformedRequestError(f"expected header, chunks, end; got {kind} out of order")

    @property
    def claim(self) -> tuple[str, str, AttemptKey]:
        """Lease, worker and attempt under which the submission comes."""
        header = self._header
        if header is None:
            raise MalformedRequestError("the stream broke off before its header")
        return header.lease_id, header.worker_id, _decode_key(header)

    @property
    def announced_bytes(self) -> int:
        """Upper bound of the bytes that follow."""
        return self._expected

    def build_trajectory(self) -> Trajectory:
        """Build the whole trajectory, once the stream has ended."""
        header = self._header
        if header is None or self._end is None:
            raise MalformedRequestError("the stream broke off before its end part")
        token_ids = [bytes(array) for array in self._token_ids]
        logprobs = [bytes(array) for array in self._logprobs]
        digest = hashlib.sha256()
        for ids, scores in zip(token_ids, logprobs, strict=True):
            digest.update(ids)
            digest.update(scores)
        if digest.digest() != self._end:
            raise MalformedRequestError("content_digest does not match the chunks received")
        sequences = tuple(
            _decode_sequence(item, ids, scores, self._limits, f"sequence {number}")
            for number, (item, ids, scores) in enumerate(
                zip(header.sequences, token_ids, logprobs, strict=True)
            )
        )
        return _decode_trajectory(header, sequences, self._end)

    def _read_header(self, header: trajectory_pb2.TrajectoryHeader) -> None:
        count = len(header.sequences)
        if count > _MAX_SEQUENCES or len(header.turns) > _MAX_TURNS:
            raise MalformedRequestError(
                f"{count} sequences, {len(header.turns)} turns are too many"
            )
        spans = sum(len(sequence.spans) for sequence in header.sequences)
        if spans > _MAX_SPANS:
            raise MalformedRequestError(f"{spans} spans are too many; at most {_MAX_SPANS}")
        for number, sequence in enumerate(header.sequences):
            if not 0 < sequence.token_count <= self._limits.max_tokens:
                raise MalformedRequestError(
                    f"sequence {number} has {sequence.token_count} tokens;"
                    f" 1 to {self._limits.max_tokens} are allowed"
                )
        self._header = header
        self._token_ids = [bytearray() for _ in range(count)]
        self._logprobs = [bytearray() for _ in range(count)]
        self._expected = sum(8 * sequence.token_count for sequence in header.sequences)

    def _append_chunk(self, chunk: trajectory_pb2.SequenceChunk) -> None:
        if chunk.sequence_index >= len(self._token_ids):
            raise MalformedRequestError(
                f"chunk of sequence {chunk.sequence_index}, which has no header"
            )
        size = len(chunk.token_ids) + len(chunk.logprobs)
        if not size:
            # A stream of these would never come to its end.
            raise MalformedRequestError("a chunk is empty")
        self._received += size
        if self._received > self._expected:
            raise MalformedRequestError("the chunks hold more than the header announced")
        self._token_ids[chunk.sequence_index].extend(chunk.token_ids)
        self._logprobs[chunk.sequence_index].extend(chunk.logprobs)


def to_policy_id(message: policy_pb2.PolicyId) -> PolicyId:
    return PolicyId(message.run_epoch, message.version, message.fingerprint)


def to_floats(data: bytes) -> NDArray[np.float32]:
    """Decode little-endian float32. Raises MalformedRequestError."""
    if len(data) % 4:
        raise MalformedRequestError(f"{len(data)} bytes are not a whole number of float32")
    return np.frombuffer(data, dtype="<f4")


_AUTHORS = {
    trajectory_pb2.AUTHOR_PROMPT: Author.PROMPT,
    trajectory_pb2.AUTHOR_POLICY: Author.POLICY,
    trajectory_pb2.AUTHOR_ENVIRONMENT: Author.ENVIRONMENT,
}
_STOPS = {
    trajectory_pb2.STOP_REASON_DONE: StopReason.DONE,
    trajectory_pb2.STOP_REASON_MAX_TURNS: StopReason.MAX_TURNS,
    trajectory_pb2.STOP_REASON_CONTEXT_OVERFLOW: StopReason.CONTEXT_OVERFLOW,
    trajectory_pb2.STOP_REASON_GENERATION_LENGTH: StopReason.GENERATION_LENGTH,
    trajectory_pb2.STOP_REASON_TIMEOUT: StopReason.TIMEOUT,
}
_FAILURES = {
    trajectory_pb2.FAILURE_KIND_ENV_LOST: FailureKind.ENV_LOST,
    trajectory_pb2.FAILURE_KIND_ENGINE_ERROR: FailureKind.ENGINE_ERROR,
    trajectory_pb2.FAILURE_KIND_ABORTED: FailureKind.ABORTED,
    trajectory_pb2.FAILURE_KIND_NO_GRADE: FailureKind.NO_GRADE,
    trajectory_pb2.FAILURE_KIND_TEMPLATE_ERROR: FailureKind.TEMPLATE_ERROR,
}


def _decode_sequence(
    header: trajectory_pb2.SequenceHeader,
    ids: bytes,
    scores: bytes,
    limits: TokenLimits,
    where: str,
) -> Sequence:
    if len(ids) != 4 * header.token_count:
        raise MalformedRequestError(f"{where}: {len(ids)} bytes for {header.token_count} token ids")
    spans = tuple(_decode_span(span, where) for span in header.spans)
    covered = sum(span.length for span in spans)
    if covered != header.token_count:
        raise MalformedRequestError(
            f"{where}: spans cover {covered} of {header.token_count} tokens"
        )
    if spans[0].author is not Author.PROMPT:
        raise MalformedRequestError(
            f"{where}: begins with no prompt; nothing predicts its first token"
        )
    _check_order(spans, where)
    token_ids = np.frombuffer(ids, dtype="<i4")
    if token_ids.min() < 0 or token_ids.max() >= limits.vocab_size:
        raise MalformedRequestError(f"{where}: a token id is outside 0..{limits.vocab_size - 1}")
    logprobs = to_floats(scores)
    written = sum(span.length for span in spans if span.author is Author.POLICY)
    if len(logprobs) != written:
        raise MalformedRequestError(
            f"{where}: {len(logprobs)} logprobs for {written} policy tokens"
        )
    _check_logprobs(logprobs, where)
    return Sequence(token_ids, spans, logprobs, tuple(map(_decode_media, header.media)))


def _check_logprobs(logprobs: NDArray[np.float32], where: str) -> None:
    """Refuse logprobs that no softmax in float32 gives a sampled token: most bytes in another
    order or of another type look so."""
    if not (np.isfinite(logprobs).all() and (logprobs <= 0).all()):
        raise MalformedRequestError(f"{where}: logprobs must be finite and at most 0")
    if (logprobs < _MIN_LOGPROB).any():
        raise MalformedRequestError(
            f"{where}: a logprob of {logprobs.min():.3g} is below {_MIN_LOGPROB:g}, which no"
            " sampled token has; logprobs are little-endian float32"
        )
    if ((logprobs != 0) & (np.abs(logprobs) < np.finfo(np.float32).tiny)).any():
        raise MalformedRequestError(
            f"{where}: a logprob is subnormal; they are little-endian float32"
        )


def _decode_span(span: trajectory_pb2.Span, where: str) -> Span:
    author = _AUTHORS.get(span.author)
    if author is None or not span.length:
        raise MalformedRequestError(f"{where}: a span needs an author and a length")
    written = author is Author.POLICY
    if written != span.HasField("policy") or written != span.HasField("temperature"):
        raise MalformedRequestError(f"{where}: policy and temperature belong to policy spans alone")
    if not written:
        return Span(author, span.length)
    if not (math.isfinite(span.temperature) and span.temperature >= 0):
        raise MalformedRequestError(f"{where}: temperature {span.temperature}")
    return Span(author, span.length, to_policy_id(span.policy), span.temperature)


def _check_order(spans: Items[Span], where: str) -> None:
    policies = [span.policy for span in spans if span.policy is not None]
    for earlier, later in pairwise(policies):
        if later < earlier:
            raise MalformedRequestError(f"{where}: the policy goes back to an older one")


def _decode_key(header: trajectory_pb2.TrajectoryHeader) -> AttemptKey:
    return AttemptKey(header.key.group_id, header.key.attempt_index, getattr(header.key, "try"))


def _decode_trajectory(
    header: trajectory_pb2.TrajectoryHeader, sequences: tuple[Sequence, ...], digest: bytes
) -> Trajectory:
    reward, failure, no_grade = _decode_outcome(header)
    stop = _STOPS.get(header.stop_reason)
    if reward is not None and (stop is None or not sequences):
        raise MalformedRequestError(
            "a graded attempt needs a stop reason and at least one sequence"
        )
    if reward is not None and stop is not StopReason.CONTEXT_OVERFLOW:
        # Only where the prompt alone was too long had the policy nothing to say.
        _check_policy_wrote(sequences)
    if header.HasField("partial_reward"):
        _check_reward("partial_reward", header.partial_reward)
    if len(header.detail) > _MAX_DETAIL:
        raise MalformedRequestError(
            f"detail has {len(header.detail)} characters; at most {_MAX_DETAIL}"
        )
    if (size := len(header.suspicion)) > _MAX_DETAIL:
        raise MalformedRequestError(f"suspicion has {size} characters; at most {_MAX_DETAIL}")
    return Trajectory(
        key=_decode_key(header),
        lease_id=header.lease_id,
        sequences=sequences,
        content_digest=digest,
        reward=reward,
        failure=failure,
        no_grade=no_grade,
        detail=header.detail,
        stop_reason=stop,
        partial_reward=header.partial_reward if header.HasField("partial_reward") else None,
        checks_passed=tuple(header.checks_passed),
        checks_failed=tuple(header.checks_failed),
        suspicion=header.suspicion,
        turns=tuple(_decode_turn(turn) for turn in header.turns),
        counts=_decode_counts(header.counts),
        facts=_decode_facts(header),
    )


def _check_reward(name: str, value: float) -> None:
    # NaN is within no bounds.
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise MalformedRequestError(f"{name} {value} is not from {-MAX_REWARD:g} to {MAX_REWARD:g}")


def _check_policy_wrote(sequences: Items[Sequence]) -> None:
    if not any(len(sequence.logprobs) for sequence in sequences):
        raise MalformedRequestError("a graded attempt has no token of the policy")


def _decode_outcome(
    header: trajectory_pb2.TrajectoryHeader,
) -> tuple[float | None, FailureKind | None, str]:
    kind = header.WhichOneof("outcome")
    if kind == "reward":
        _check_reward("reward", header.reward)
        return header.reward, None, ""
    if kind == "no_grade":
        name = trajectory_pb2.NoGradeReason.Name(header.no_grade)
        return None, FailureKind.NO_GRADE, name.removeprefix("NO_GRADE_REASON_").lower()
    failure = _FAILURES.get(header.failure)
    if failure is None:
        raise MalformedRequestError("exactly one of reward, no_grade and failure must be set")
    return None, failure, ""


def _decode_turn(turn: trajectory_pb2.TurnTiming) -> TurnTiming:
    spent = (to_seconds(turn.generate), to_seconds(turn.tools))
    return TurnTiming(*spent, turn.prompt_tokens, turn.generated_tokens)


def _decode_counts(counts: trajectory_pb2.TrajectoryCounts) -> Counts:
    return Counts(
        turns=counts.turns,
        tool_calls=counts.tool_calls,
        tool_errors=_decode_named_counts(counts.tool_errors, "tool_errors"),
        parse_errors=counts.parse_errors,
        repeats=counts.repeats,
        open_s=to_seconds(counts.open),
        grade_s=to_seconds(counts.grade),
        tools=counts.tools,
        malformed_turns=counts.malformed_turns,
        parse_messages=_decode_named_counts(counts.parse_messages, "parse_messages"),
        unknown_tools=_decode_named_counts(counts.unknown_tools, "unknown_tools"),
    )


def _decode_named_counts(counts: Mapping[str, int], where: str) -> dict[str, int]:
    """Decode counts by what a policy wrote: bounded, for they are kept."""
    if len(counts) > _MAX_NAMED or any(len(name) > _MAX_NAME for name in counts):
        raise MalformedRequestError(
            f"counts.{where}: {len(counts)} keys; at most {_MAX_NAMED}, of {_MAX_NAME} characters"
        )
    return dict(counts)


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


def _decode_media(item: trajectory_pb2.MediaReference) -> Media:
    digests = (item.sha256.hex(), item.processor_digest.hex())
    return Media(digests[0], item.mime, tuple(item.grid), item.token_offset, digests[1])
