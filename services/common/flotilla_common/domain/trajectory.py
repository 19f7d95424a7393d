"""One try at one attempt: its tokens, its outcome and its circumstances."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from flotilla_common.domain.attempts import MAX_REWARD, AttemptKey, FailureKind, StopReason
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Span
from flotilla_common.images.picture import PlacedPicture

# Limit of the media bytes kept per sequence: room for a handful of tool answers of any length that
# fits a context, and small beside the rest of a group in the journal.
MOST_MEDIA_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Media:
    """An item that the policy saw at least in part: a picture, or a truncated tool answer.

    `token_offset` is the first token of the run that shows it. `content` is the whole item, or
    empty if it is not kept here: the bytes of pictures are in `Trajectory.pictures`. `grid` is a
    picture's patches in time, height and width."""

    sha256: str
    mime: str
    grid: tuple[int, ...] = ()
    token_offset: int = 0
    processor_digest: str = ""
    size_bytes: int = 0
    content: bytes = field(default=b"", repr=False)

    @property
    def place(self) -> PlacedPicture:
        """Where a picture stands in its sequence. Raises ValueError without a whole grid."""
        frames, high, wide = self.grid
        return PlacedPicture(self.sha256, (frames, high, wide), self.token_offset)


def is_picture(mime: str) -> bool:
    """Return True for media that are pictures, not text."""
    return mime.startswith("image/")


# [tokens, layers, experts per token]; layers without experts count too.
Experts = NDArray[np.uint8 | np.uint16]
_NO_EXPERTS: Experts = np.zeros(0, np.uint8)

# [policy tokens, most of one token]: ids of the tokens that each one was sampled from, itself among
# them; NO_CANDIDATE fills rows with fewer.
Candidates = NDArray[np.int32]
NO_CANDIDATE = -1
_NO_CANDIDATES: Candidates = np.zeros(0, np.int32)


def expert_dtype(experts: int) -> type[np.uint8 | np.uint16]:
    """Return the smallest type that holds the ids of so many experts."""
    return np.uint8 if experts <= 2**8 else np.uint16


class SequenceCause(StrEnum):
    """Why a sequence is not the whole conversation: its context was compacted before it, it is a
    branch (a subagent's, for instance), or one step."""

    COMPACTION = "compaction"
    BRANCH = "branch"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class SequenceOrigin:
    """Why a sequence is a part of its attempt, and which other one of the attempt it continues: its
    first `shared` tokens are the first of sequence `parent`, which comes before it.

    They are its prompt, are trained in the parent only, and travel and are stored there only."""

    cause: SequenceCause
    parent: int | None = None
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens that the policy saw at once. `logprobs` cover only its own tokens, in order."""

    token_ids: NDArray[np.int32]
    spans: tuple[Span, ...]
    logprobs: NDArray[np.float32]
    media: tuple[Media, ...] = ()
    # Experts that the engine chose, from the first token on; the last token never passes the model.
    experts: Experts | None = None
    # What its own tokens say, encoded (see `messages`); without any, only authors are known.
    messages: bytes = field(default=b"", repr=False)
    # None: it is the whole conversation.
    origin: SequenceOrigin | None = None
    # None: its own tokens were sampled from the whole vocabulary.
    candidates: Candidates | None = None

    @property
    def shared(self) -> int:
        """Number of its first tokens that are its parent's."""
        return self.origin.shared if self.origin else 0

    @property
    def pictures(self) -> tuple[Media, ...]:
        """Media of it that are pictures, in the order of their tokens."""
        return tuple(item for item in self.media if is_picture(item.mime))

    @property
    def picture_ids(self) -> frozenset[int]:
        """The ids of the tokens that stand for its pictures."""
        count = len(self.token_ids)
        places = (item.token_offset for item in self.pictures)
        return frozenset(int(self.token_ids[at]) for at in places if at < count)


# A tuple, for the same reason as Span.
class TurnTiming(NamedTuple):
    """Times and tokens of one turn, `thinking_tokens` among them, and the environment's reward for
    its calls if it rewards every step."""

    generate_s: float
    tools_s: float
    prompt_tokens: int
    generated_tokens: int
    reward: float | None = None
    thinking_tokens: int = 0

    @property
    def usable_reward(self) -> float | None:
        """The reward, unless it is beyond what an attempt's may be."""
        within = self.reward is not None and abs(self.reward) <= MAX_REWARD
        return self.reward if within else None


@dataclass(slots=True)
class Counts:
    """Counts of one attempt; keys of `tool_errors` are tool outcomes."""

    turns: int = 0
    tool_calls: int = 0
    tool_errors: dict[str, int] = field(default_factory=dict[str, int])
    parse_errors: int = 0
    repeats: int = 0
    open_s: float = 0.0
    grade_s: float = 0.0
    # Offered tools, and turns with a malformed call.
    tools: int = 0
    malformed_turns: int = 0
    # Sampled tokens that the engine had not named among their candidates.
    mended_candidates: int = 0
    # A few faults of malformed calls, and a few names of tools that do not exist.
    parse_messages: dict[str, int] = field(default_factory=dict[str, int])
    unknown_tools: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Facts:
    """Circumstances of an attempt: what it ran on and against; digests are in hex."""

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
    """One try at one attempt. Exactly one of `reward` and `failure` is set (I12), except while the
    attempt waits for its group's verdict: then neither is, and `judged` is."""

    key: AttemptKey
    lease_id: str
    sequences: tuple[Sequence, ...]
    content_digest: bytes
    reward: float | None = None
    failure: FailureKind | None = None
    # Why the grade is unknown, if `failure` is NO_GRADE.
    no_grade: str = ""
    # A judge compares it with the others of its group: `reward` is the judge's score, if any.
    judged: bool = False
    detail: str = ""
    stop_reason: StopReason | None = None
    partial_reward: float | None = None
    # Further numbers that the verifier returned, by name; a missing one is unknown.
    named_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    checks_passed: tuple[str, ...] = ()
    checks_failed: tuple[str, ...] = ()
    # A judge's failure that the verifier printed and the policy may have written; it did not count.
    suspicion: str = ""
    turns: tuple[TurnTiming, ...] = ()
    counts: Counts = field(default_factory=Counts)
    facts: Facts = Facts()
    # The tools that the chat template was given, as a JSON array; empty if unknown. The journal
    # keeps them once, under the digest in `facts`.
    tools: bytes = field(default=b"", repr=False)
    # PNG or JPEG files that its sequences show, by hexadecimal SHA-256, as far as they are at hand:
    # those that the learner already has for the group do not travel again, and what reads only
    # tokens from a journal does not load them.
    pictures: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)

    @property
    def is_graded(self) -> bool:
        return self.reward is not None

    @property
    def awaits_verdict(self) -> bool:
        """True until the verdict on its group gives it a score, or none to anybody."""
        return self.judged and self.reward is None and self.failure is None

    @property
    def end_reason(self) -> StopReason | FailureKind:
        """Reason for the end of the attempt, graded or not."""
        return self.stop_reason or self.failure or FailureKind.NO_GRADE

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of all sequences, in order."""
        return tuple(span for sequence in self.sequences for span in sequence.spans)

    @property
    def policies(self) -> tuple[PolicyId, ...]:
        """Policies that wrote a part of it, in order of appearance, with repeats."""
        return tuple(span.policy for span in self.spans if span.policy is not None)

    @property
    def policy_tokens(self) -> int:
        return sum(len(sequence.logprobs) for sequence in self.sequences)

    @property
    def shown_pictures(self) -> dict[str, Media]:
        """Each picture that its sequences show, by hexadecimal SHA-256, at one of its places."""
        return {item.sha256: item for each in self.sequences for item in each.pictures}


def content_digest(sequences: Items[Sequence]) -> bytes:
    """Digest the bytes of token ids, logprobs, experts and candidates, and the hashes of pictures,
    sequence by sequence."""
    return digest_arrays(
        part
        for each in sequences
        for part in (*wire_arrays(each), *(bytes.fromhex(p.sha256) for p in each.pictures))
    )


def digest_arrays(arrays: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """XXH3-128 over the concatenated bytes of all arrays.

    Not cryptographic: it detects truncated, swapped or damaged arrays, and distinguishes two
    submissions of one attempt. Both come from one authenticated worker, which could have sent
    anything anyway, so it gains nothing from a collision."""
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(array)
    return digest.digest()


def wire_arrays(sequence: Sequence) -> tuple[memoryview, memoryview, memoryview, memoryview]:
    """Return token ids, logprobs, expert ids and candidates as they are on the wire and on disk:
    without what a parent has, little-endian and flat, copied only if they are not so already."""
    experts = sequence.experts if sequence.experts is not None else _NO_EXPERTS
    if sequence.shared:
        experts = experts[sequence.shared :]
    candidates = sequence.candidates if sequence.candidates is not None else _NO_CANDIDATES
    return (
        np.ascontiguousarray(sequence.token_ids[sequence.shared :], "<i4").data,
        np.ascontiguousarray(sequence.logprobs, "<f4").data,
        np.ascontiguousarray(experts, experts.dtype.newbyteorder("<")).reshape(-1).data,
        np.ascontiguousarray(candidates, "<i4").reshape(-1).data,
    )


def join_parent(
    parent: Sequence, shared: int, token_ids: NDArray[np.int32], experts: Experts | None
) -> tuple[NDArray[np.int32], Experts | None]:
    """Return the whole arrays of a sequence from its own and its parent's. Raises ValueError."""
    if not 0 < shared <= len(parent.token_ids):
        raise ValueError(f"shares {shared} tokens of {len(parent.token_ids)} of its parent")
    joined = np.concatenate([parent.token_ids[:shared], token_ids])
    if experts is None:
        return joined, None
    if parent.experts is None or len(parent.experts) < shared:
        raise ValueError("has experts, but its parent has none of the shared tokens")
    return joined, np.concatenate([parent.experts[:shared], experts])
