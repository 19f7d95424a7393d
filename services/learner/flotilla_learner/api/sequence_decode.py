"""Decoding and checking of one token sequence of a submission, from its header and bytes."""

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.domain.messages import check_messages
from flotilla_common.domain.token_authors import Author, Span, policy_mask
from flotilla_common.domain.trajectory import (
    MOST_MEDIA_BYTES,
    NO_CANDIDATE,
    Candidates,
    Experts,
    Media,
    Sequence,
    SequenceOrigin,
    expert_dtype,
    join_parent,
)
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.spec.number_ranges import MOST_CANDIDATES
from flotilla_common.wire.enums import SEQUENCE_CAUSES
from flotilla_common.wire.trajectory import decode_media
from flotilla_common.wire.trajectory_columns import decode_spans
from flotilla_learner.types import ExpertShape

_MAX_MEDIA = 4096
_MIN_LOGPROB = -1e4
_LEAST_NORMAL = np.finfo(np.float32).tiny


class MalformedRequestError(ValueError):
    """A message contradicts itself or the contract."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits of a token sequence."""

    vocab_size: int
    max_tokens: int
    # None: experts are not accepted.
    experts: ExpertShape | None = None
    # None: pictures are not accepted.
    vision: VisionFamily | None = None


def to_floats(data: bytes | bytearray) -> NDArray[np.float32]:
    """Decode little-endian float32. Raises MalformedRequestError."""
    if len(data) % 4:
        raise MalformedRequestError(f"{len(data)} bytes are not a whole number of float32")
    return np.frombuffer(data, dtype="<f4")


@dataclass(slots=True)
class SequenceArrays:
    """Bytes of one sequence as received so far; arrays made of them are views."""

    ids: bytes | bytearray = b""
    scores: bytes | bytearray = b""
    media: bytes | bytearray = b""
    experts: bytes | bytearray = b""
    messages: bytes | bytearray = b""
    candidates: bytes | bytearray = b""


def check_media(header: trajectory_pb2.SequenceHeader, where: str) -> int:
    """Return how many bytes of media a header announces; refuse too many, and partial ones."""
    if len(header.media) > _MAX_MEDIA:
        raise MalformedRequestError(f"{where}: {len(header.media)} media are too many")
    if (sent := sum(item.sent_bytes for item in header.media)) > MOST_MEDIA_BYTES:
        raise MalformedRequestError(
            f"{where}: {sent} bytes of media; at most {MOST_MEDIA_BYTES} are taken"
        )
    for number, item in enumerate(header.media):
        if item.sent_bytes not in (0, item.size_bytes):
            raise MalformedRequestError(
                f"{where}: media[{number}] is sent in part,"
                f" {item.sent_bytes} of {item.size_bytes} bytes"
            )
    return sent


def check_experts(header: trajectory_pb2.SequenceHeader, limits: TokenLimits, where: str) -> int:
    """Return how many bytes of experts a header announces; refuse those of another model."""
    if not header.HasField("experts"):
        return 0
    shape, own = header.experts, limits.experts
    if own is None:
        raise MalformedRequestError(f"{where}: has experts, but policy.routing_replay is off")
    if (shape.layers, shape.chosen) != (own.layers, own.chosen):
        raise MalformedRequestError(
            f"{where}: {shape.chosen} experts a token in {shape.layers} layers; this model chooses"
            f" {own.chosen} in {own.layers}"
        )
    if shape.token_count > header.token_count:
        raise MalformedRequestError(
            f"{where}: experts of {shape.token_count} tokens; there are {header.token_count}"
        )
    if shape.token_count < (shared := header.origin.shared_tokens):
        raise MalformedRequestError(
            f"{where}: experts of {shape.token_count} tokens, fewer than the shared {shared}"
        )
    size = expert_dtype(own.experts)().itemsize
    return size * shape.token_count * shape.layers * shape.chosen


def _decode_experts(
    header: trajectory_pb2.SequenceHeader,
    content: bytes | bytearray,
    limits: TokenLimits,
    where: str,
) -> Experts | None:
    """Return the experts of the sequence's own tokens."""
    announced = check_experts(header, limits, where)
    if announced:
        # Those of the shared tokens are its parent's.
        announced -= announced // header.experts.token_count * header.origin.shared_tokens
    if len(content) != announced:
        raise MalformedRequestError(
            f"{where}: {len(content)} bytes for {announced} bytes of experts"
        )
    if limits.experts is None or not header.experts.token_count:
        return None
    shape, own = header.experts, limits.experts
    dtype = np.dtype(expert_dtype(own.experts)).newbyteorder("<")
    found = np.frombuffer(content, dtype).reshape(-1, shape.layers, shape.chosen)
    if found.size and found.max() >= own.experts:
        raise MalformedRequestError(f"{where}: an expert is outside 0..{own.experts - 1}")
    return found


def check_candidates(header: trajectory_pb2.SequenceHeader, where: str) -> int:
    """Return how many bytes of candidates a header announces; refuse too many of a token."""
    if header.candidates > MOST_CANDIDATES:
        raise MalformedRequestError(
            f"{where}: {header.candidates} candidates of a token; at most {MOST_CANDIDATES}"
        )
    spans, by_policy = header.spans, trajectory_pb2.AUTHOR_POLICY
    pairs = zip(spans.authors, spans.lengths, strict=False)
    sampled = sum(length for author, length in pairs if author == by_policy)
    return 4 * header.candidates * min(sampled, header.token_count)


def _decode_candidates(
    content: bytes | bytearray,
    columns: int,
    sampled: NDArray[np.int32],
    vocab_size: int,
    where: str,
) -> Candidates | None:
    """Return the candidates of the `sampled` tokens."""
    if len(content) != 4 * columns * len(sampled):
        raise MalformedRequestError(
            f"{where}: {len(content)} bytes for {columns} candidates of {len(sampled)} tokens"
        )
    if not columns:
        return None
    found = np.frombuffer(content, "<i4").reshape(-1, columns)
    known, ordered = found != NO_CANDIDATE, np.sort(found, 1)
    if found.size and not NO_CANDIDATE <= ordered[:, 0].min() <= ordered[:, -1].max() < vocab_size:
        raise MalformedRequestError(f"{where}: a candidate is outside 0..{vocab_size - 1}")
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_CANDIDATE)
    if twice.any() or (known[:, 1:] & ~known[:, :-1]).any():
        raise MalformedRequestError(f"{where}: candidates must differ, and -1 only follow them")
    if not (found == sampled[:, None]).any(1).all():
        raise MalformedRequestError(f"{where}: a sampled token is not among its candidates")
    return found


def _decode_media(
    header: trajectory_pb2.SequenceHeader, content: bytes | bytearray, where: str
) -> Iterator[Media]:
    start = 0
    for number, item in enumerate(header.media):
        kept = bytes(content[start : start + item.sent_bytes])
        start += item.sent_bytes
        if item.sent_bytes and hashlib.sha256(kept).digest() != item.sha256:
            raise MalformedRequestError(f"{where}: media[{number}] does not match its sha256")
        yield decode_media(item, kept)
    if start != len(content):
        raise MalformedRequestError(f"{where}: {len(content)} bytes for {start} bytes of media")


def decode_sequence(
    header: trajectory_pb2.SequenceHeader,
    arrays: SequenceArrays,
    limits: TokenLimits,
    where: str,
    earlier: Items[Sequence] = (),
) -> Sequence:
    """Return the sequence of a header; `where` names it in a refusal, and `earlier` are those
    before it."""
    ids, scores, size = arrays.ids, arrays.scores, header.token_count
    origin = _decode_origin(header, len(earlier), where) if header.HasField("origin") else None
    shared = origin.shared if origin else 0
    if len(ids) != 4 * (size - shared):
        raise MalformedRequestError(f"{where}: {len(ids)} bytes for {size - shared} token ids")
    spans = _decode_spans(header, where)
    covered = sum(span.length for span in spans)
    if covered != size:
        raise MalformedRequestError(f"{where}: spans cover {covered} of {size} tokens")
    if spans[0].author is not Author.PROMPT:
        raise MalformedRequestError(
            f"{where}: has no prompt at its start; nothing predicts its first token"
        )
    if shared > spans[0].length:
        raise MalformedRequestError(
            f"{where}: shares {shared} tokens, of which only {spans[0].length} are its prompt"
        )
    _check_order(spans, where)
    token_ids = np.frombuffer(ids, dtype="<i4")
    # As unsigned integers, negative ids exceed every vocabulary.
    if token_ids.view("<u4").max() >= limits.vocab_size:
        raise MalformedRequestError(f"{where}: a token id is outside 0..{limits.vocab_size - 1}")
    logprobs = to_floats(scores)
    written = sum(span.length for span in spans if span.policy is not None)
    if len(logprobs) != written:
        raise MalformedRequestError(
            f"{where}: {len(logprobs)} logprobs for {written} policy tokens"
        )
    _check_logprobs(logprobs, where)
    sampled = token_ids[policy_mask(spans)[shared:]]
    candidates = _decode_candidates(
        arrays.candidates, header.candidates, sampled, limits.vocab_size, where
    )
    media = tuple(_decode_media(header, arrays.media, where))
    experts = _decode_experts(header, arrays.experts, limits, where)
    messages = bytes(arrays.messages)
    if len(messages) != header.messages_bytes:
        raise MalformedRequestError(
            f"{where}: {len(messages)} bytes for {header.messages_bytes} bytes of messages"
        )
    try:
        check_messages(messages, shared, size, [each.sha256 for each in media] if media else ())
        if origin and origin.parent is not None:
            token_ids, experts = join_parent(earlier[origin.parent], shared, token_ids, experts)
    except ValueError as error:
        raise MalformedRequestError(f"{where}: {error}") from None
    return Sequence(token_ids, spans, logprobs, media, experts, messages, origin, candidates)


def _decode_origin(
    header: trajectory_pb2.SequenceHeader, earlier: int, where: str
) -> SequenceOrigin:
    origin = header.origin
    parent = origin.parent if origin.HasField("parent") else None
    if (parent is not None and parent >= earlier) or (parent is None and origin.shared_tokens):
        raise MalformedRequestError(f"{where}: shares tokens with a parent that is not before it")
    if origin.shared_tokens >= header.token_count:
        raise MalformedRequestError(f"{where}: has no token of its own")
    try:
        return SequenceOrigin(SEQUENCE_CAUSES.decode(origin.cause), parent, origin.shared_tokens)
    except ValueError as error:
        raise MalformedRequestError(f"{where}: cause {error}") from None


def _check_logprobs(logprobs: NDArray[np.float32], where: str) -> None:
    """Refuse logprobs that no softmax in float32 gives a sampled token; most data in the wrong
    byte order or type look like that."""
    if not len(logprobs):
        return
    # NaN, which both are if any is, is outside any bounds.
    lowest, highest = logprobs.min(), logprobs.max()
    if not (lowest > -np.inf and highest <= 0):
        raise MalformedRequestError(f"{where}: logprobs must be finite and at most 0")
    if lowest < _MIN_LOGPROB:
        raise MalformedRequestError(
            f"{where}: a logprob of {lowest:.3g} is below {_MIN_LOGPROB:g}, which no"
            " sampled token has; logprobs are little-endian float32"
        )
    if highest > -_LEAST_NORMAL and ((logprobs < 0) & (logprobs > -_LEAST_NORMAL)).any():
        raise MalformedRequestError(
            f"{where}: a logprob is subnormal; they are little-endian float32"
        )


def _decode_spans(header: trajectory_pb2.SequenceHeader, where: str) -> tuple[Span, ...]:
    try:
        return decode_spans(header.spans)
    except ValueError as error:
        raise MalformedRequestError(f"{where}: {error}") from None


def _check_order(spans: Items[Span], where: str) -> None:
    policies = [span.policy for span in spans if span.policy is not None]
    for earlier, later in pairwise(policies):
        if later is not earlier and later < earlier:
            raise MalformedRequestError(f"{where}: a later span has an older policy")
