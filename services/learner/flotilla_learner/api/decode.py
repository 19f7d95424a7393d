"""Assembly of submitted trajectories, with every check on the way."""

import re
from collections.abc import Iterator, Mapping
from math import isfinite

from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.domain.attempts import (
    MAX_REWARD,
    MOST_NAMED_REWARDS,
    REWARD_NAME,
    StopReason,
)
from flotilla_common.domain.messages import MOST_MESSAGES_BYTES, MessagesError, check_tools
from flotilla_common.domain.trajectory import Sequence, Trajectory, digest_arrays, is_picture
from flotilla_common.wire.trajectory import decode_key, decode_trajectory
from flotilla_learner.api.picture_decode import PictureIntake, check_pictures
from flotilla_learner.api.sequence_decode import (
    MalformedRequestError,
    SequenceArrays,
    TokenLimits,
    check_candidates,
    check_experts,
    check_media,
    decode_sequence,
)
from flotilla_learner.group_types import SubmittedTry

_MAX_SEQUENCES = 256
_MAX_TURNS = 4096
# For all sequences together; a turn has a few.
_MAX_SPANS = 4 * _MAX_TURNS
_MAX_DETAIL = 2000
# Most keys in one map of counts, and most characters of a key.
_MAX_NAMED, _MAX_NAME = 8, 200


class TrajectoryAssembler:
    """Assembles one submission, from its header on. Raises MalformedRequestError."""

    def __init__(self, first: groups_pb.SubmitTrajectoryRequest, limits: TokenLimits) -> None:
        """Take the first message of the stream."""
        _check_kind(first, "header")
        self._header = header = first.header
        self._limits = limits
        sequences, turns = header.sequences, len(header.turns.prompt_tokens)
        if len(sequences) > _MAX_SEQUENCES or turns > _MAX_TURNS:
            raise MalformedRequestError(f"{len(sequences)} sequences, {turns} turns are too many")
        spans = sum(len(sequence.spans.lengths) for sequence in sequences)
        if spans > _MAX_SPANS:
            raise MalformedRequestError(f"{spans} spans are too many; at most {_MAX_SPANS}")
        if header.tools:
            try:
                check_tools(header.tools)
            except MessagesError as error:
                raise MalformedRequestError(str(error)) from None
        self._pictures = PictureIntake(header, limits.vision)
        # Upper bound on the bytes that follow: those of arrays, and of all.
        self._array_bytes = sum(
            self._announced_bytes(sequence, f"sequence {number}")
            for number, sequence in enumerate(sequences)
        )
        self.announced_bytes = self._array_bytes + self._pictures.announced_bytes
        self._arrays = [SequenceArrays() for _ in sequences]
        self._received = 0

    @property
    def claim(self) -> SubmittedTry:
        """What the header claims to submit."""
        header = self._header
        return SubmittedTry(header.lease_id, header.worker_id, decode_key(header.key))

    def add_chunk(self, part: groups_pb.SubmitTrajectoryRequest) -> None:
        """Take the next message of the stream."""
        if part.WhichOneof("part") == "picture":
            self._pictures.add_chunk(part.picture)
            return
        _check_kind(part, "chunk")
        chunk = part.chunk
        if chunk.sequence_index >= len(self._arrays):
            raise MalformedRequestError(
                f"chunk of sequence {chunk.sequence_index}, which has no header"
            )
        # Each access to a field copies it.
        ids, scores, media, experts = chunk.token_ids, chunk.logprobs, chunk.media, chunk.experts
        messages, candidates = chunk.messages, chunk.candidates
        size = sum(map(len, (ids, scores, media, experts, messages, candidates)))
        if not size:
            # A stream of empty chunks would never end.
            raise MalformedRequestError("a chunk is empty")
        self._received += size
        if self._received > self._array_bytes:
            raise MalformedRequestError("the chunks hold more than the header announced")
        arrays = self._arrays[chunk.sequence_index]
        arrays.ids = _extend(arrays.ids, ids)
        arrays.scores = _extend(arrays.scores, scores)
        arrays.media = _extend(arrays.media, media)
        arrays.experts = _extend(arrays.experts, experts)
        arrays.messages = _extend(arrays.messages, messages)
        arrays.candidates = _extend(arrays.candidates, candidates)

    def build_trajectory(self) -> Trajectory:
        """Build the whole trajectory once the stream has ended."""
        header = self._header
        if digest_arrays(self._digested_parts()) != header.content_digest:
            raise MalformedRequestError("content_digest does not match the chunks received")
        self._pictures.check_whole()
        sequences: list[Sequence] = []
        for item, arrays in zip(header.sequences, self._arrays, strict=True):
            where = f"sequence {len(sequences)}"
            sequences.append(decode_sequence(item, arrays, self._limits, where, sequences))
            if family := self._limits.vision:
                check_pictures(sequences[-1], family, self._pictures.sizes, where)
        trajectory = decode_trajectory(header, tuple(sequences), self._pictures.files)
        _check_trajectory(trajectory)
        return trajectory

    def _digested_parts(self) -> Iterator[bytes | bytearray]:
        for sequence, arrays in zip(self._header.sequences, self._arrays, strict=True):
            yield from (arrays.ids, arrays.scores, arrays.experts, arrays.candidates)
            yield from (item.sha256 for item in sequence.media if is_picture(item.mime))

    def _announced_bytes(self, sequence: trajectory_pb2.SequenceHeader, where: str) -> int:
        """Return how many bytes of a sequence's arrays follow."""
        tokens = sequence.token_count
        if not 0 < tokens <= self._limits.max_tokens:
            raise MalformedRequestError(
                f"{where} has {tokens} tokens; 1 to {self._limits.max_tokens} are allowed"
            )
        messages = sequence.messages_bytes
        if messages > MOST_MESSAGES_BYTES:
            raise MalformedRequestError(
                f"{where}: {messages} bytes of messages; at most {MOST_MESSAGES_BYTES} are taken"
            )
        return (
            8 * tokens
            + check_media(sequence, where)
            + check_experts(sequence, self._limits, where)
            + check_candidates(sequence, where)
            + messages
        )


def _check_kind(part: groups_pb.SubmitTrajectoryRequest, expected: str) -> None:
    if (kind := part.WhichOneof("part")) != expected:
        raise MalformedRequestError(f"expected a header, then chunks; got {kind} out of order")


def _extend(known: bytes | bytearray, piece: bytes) -> bytes | bytearray:
    """Return both as one; the first piece, usually the only one, is not copied."""
    if not known:
        return piece
    whole = known if isinstance(known, bytearray) else bytearray(known)
    whole += piece
    return whole


def _check_trajectory(trajectory: Trajectory) -> None:
    if trajectory.reward is not None:
        _check_reward("reward", trajectory.reward)
        _check_whole(trajectory)
    elif trajectory.judged:
        _check_whole(trajectory)
    elif trajectory.failure is None:
        raise MalformedRequestError(
            "exactly one of reward, no_grade, failure and to_be_judged must be set"
        )
    if trajectory.partial_reward is not None:
        _check_reward("partial_reward", trajectory.partial_reward)
    _check_named_rewards(trajectory.named_rewards)
    for name in ("detail", "suspicion"):
        if (size := len(getattr(trajectory, name))) > _MAX_DETAIL:
            raise MalformedRequestError(f"{name} has {size} characters; at most {_MAX_DETAIL}")
    counts = trajectory.counts
    for name, seconds in (("open_s", counts.open_s), ("grade_s", counts.grade_s)):
        if not isfinite(seconds):
            raise MalformedRequestError(f"counts.{name} is {seconds}")
    for name in ("tool_errors", "parse_messages", "unknown_tools"):
        _check_named_counts(getattr(counts, name), name)


def _check_reward(name: str, value: float) -> None:
    # NaN is outside any bounds.
    if not -MAX_REWARD <= value <= MAX_REWARD:
        raise MalformedRequestError(f"{name} {value} is not from {-MAX_REWARD:g} to {MAX_REWARD:g}")


def _check_named_rewards(rewards: Mapping[str, float]) -> None:
    if len(rewards) > MOST_NAMED_REWARDS:
        raise MalformedRequestError(
            f"{len(rewards)} named_rewards; at most {MOST_NAMED_REWARDS} are taken"
        )
    for name, value in rewards.items():
        if not re.fullmatch(REWARD_NAME, name):
            raise MalformedRequestError(
                f"named_rewards: {name[:100]!r} is no name of 1 to 64 of A-Z a-z 0-9 _ . -"
            )
        _check_reward(f"named_rewards[{name!r}]", value)


def _check_whole(trajectory: Trajectory) -> None:
    if trajectory.stop_reason is None or not trajectory.sequences:
        raise MalformedRequestError(
            "a graded attempt needs a stop reason and at least one sequence"
        )
    # A graded attempt without policy tokens is valid only if the prompt itself was too long.
    prompt_alone = trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    if not prompt_alone and not trajectory.policy_tokens:
        raise MalformedRequestError("a graded attempt has no token of the policy")


def _check_named_counts(counts: Mapping[str, int], where: str) -> None:
    """Refuse more policy-chosen keys of counts than are kept."""
    if len(counts) > _MAX_NAMED or any(len(name) > _MAX_NAME for name in counts):
        raise MalformedRequestError(
            f"counts.{where}: {len(counts)} keys; at most {_MAX_NAMED}, of {_MAX_NAME} characters"
        )
