"""A trajectory survives its messages unchanged, and its bytes stay the same."""

import hashlib
import struct
from dataclasses import asdict, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import xxhash
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_common.domain.attempts import (
    REWARD_NAME,
    AttemptKey,
    FailureKind,
    Grade,
    NoGradeReason,
    Purpose,
    StopReason,
)
from flotilla_common.domain.messages import (
    MOST_MESSAGES_BYTES,
    MOST_TOOLS_BYTES,
    ChatMessage,
    encode_messages,
)
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span, policy_mask
from flotilla_common.domain.trajectory import (
    MOST_MEDIA_BYTES,
    NO_CANDIDATE,
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
    content_digest,
    expert_dtype,
)
from flotilla_common.run_folder.trajectory_codec import (
    array_bytes,
    restore_trajectory,
    summary_json,
)
from flotilla_common.spec.number_ranges import MOST_CANDIDATES
from flotilla_common.wire.trajectory import CHUNK_BYTES, encode_submission
from flotilla_learner.api.decode import TrajectoryAssembler
from flotilla_learner.api.sequence_decode import MalformedRequestError, TokenLimits
from flotilla_learner.types import ExpertShape
from flotilla_rollout.episodes.attempt_record import (
    AttemptState,
    make_failed_trajectory,
    make_finished_trajectory,
    make_submission,
)
from flotilla_rollout.episodes.transcript import Transcript
from flotilla_rollout.types import Completion, EpisodeInfo, Lease, PolicySpan, PromptFacts
from tests.support.examples import examples

T = TypeVar("T")
EXPERTS = ExpertShape(layers=3, experts=300, chosen=2)
LIMITS = TokenLimits(vocab_size=100_000, max_tokens=10**6, experts=EXPERTS)

# Types of the fields, as far as the contract's own types hold them.
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**32 - 1),
    # Whole nanoseconds in binary.
    float: st.integers(0, 2**20).map(lambda ticks: ticks / 64),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
}
HEX = st.binary(max_size=40).map(bytes.hex)


def every_field(cls: type[T], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[T]:
    """Build `cls` with a value drawn for each of its fields, those with a default included."""
    hints = get_type_hints(cls)
    drawn = {
        name: special[name] if name in special else values_of(hint) for name, hint in hints.items()
    }
    return st.builds(cls, **drawn)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of([st.none() if one is type(None) else values_of(one) for one in arguments])
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    return VALUES[hint] if hint in VALUES else st.sampled_from(hint)


POLICIES = every_field(
    PolicyId,
    run_epoch=st.integers(0, 2**63 - 1),
    version=st.integers(0, 2**63 - 1),
)


def kept(media: Media) -> Media:
    """Return the media with digest and size, if it has content."""
    content = media.content
    digest = hashlib.sha256(content).hexdigest()
    return replace(media, sha256=digest, size_bytes=len(content)) if content else media


MEDIA = every_field(
    Media,
    sha256=HEX,
    processor_digest=HEX,
    grid=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(tuple),
).map(kept)


def make_experts(tokens: int, experts: int = 300) -> Experts:
    """Return the experts of the first tokens of a sequence."""
    ids = np.arange(tokens * 6).reshape(tokens, 3, 2) * 7 % experts
    return ids.astype(expert_dtype(experts))


def make_candidates(sampled: NDArray[np.int32], most: int) -> Candidates:
    """Return candidates of the sampled tokens, some fewer than `most`; they are among these."""
    rows = sampled[:, None] - np.arange(most, dtype=np.int32)
    fewer = np.arange(most) > np.arange(len(sampled))[:, None]
    return np.where(fewer | (rows < 0), NO_CANDIDATE, rows).astype(np.int32)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """A trajectory that the learner accepts: prompt first, policies in order, float32 logprobs."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    policies = iter(sorted(draw(st.lists(POLICIES, min_size=5, max_size=5))))
    temperature = st.floats(0, 100, width=32)
    spans = [Span(Author.PROMPT, lengths[0])]
    for length in lengths[1:]:
        author = draw(st.sampled_from(Author))
        if author is Author.POLICY:
            spans.append(Span(author, length, next(policies), draw(temperature)))
        else:
            spans.append(Span(author, length))
    ids = draw(
        st.lists(st.integers(0, 99_999), min_size=(n := sum(lengths)), max_size=n).map(
            lambda some: np.array(some, np.int32)
        )
    )
    written = sum(span.length for span in spans if span.author is Author.POLICY)
    scores = draw(st.lists(st.integers(0, 512), min_size=written, max_size=written))
    logprobs = -np.array(scores, np.float32) / 8
    policy_ids = ids[policy_mask(tuple(spans))]
    return draw(
        every_field(
            Sequence,
            token_ids=st.just(ids),
            spans=st.just(tuple(spans)),
            logprobs=st.just(logprobs),
            media=st.lists(MEDIA, max_size=2).map(tuple),
            experts=st.none() | st.integers(1, n).map(make_experts),
            messages=st.lists(st.integers(0, n), max_size=3).map(
                lambda ends: encode_messages(
                    [ChatMessage("user", end) for end in (*sorted(ends), n) if ends]
                )
            ),
            origin=st.none(),
            candidates=st.none()
            | st.integers(1, MOST_CANDIDATES).map(lambda most: make_candidates(policy_ids, most)),
        )
    )


REWARDS = st.floats(-1e6, 1e6)
NAMED_REWARDS = st.dictionaries(st.from_regex(REWARD_NAME, fullmatch=True), REWARDS, max_size=32)
NAMED = st.dictionaries(st.text(max_size=20), VALUES[int], max_size=8)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    judged = draw(st.booleans())
    # Whole, like one that is graded.
    graded = judged or draw(st.booleans())
    failure = None if graded else draw(st.sampled_from(FailureKind))
    no_grade = failure is FailureKind.NO_GRADE and draw(st.booleans())
    stop = st.sampled_from(StopReason)
    held = draw(st.lists(sequences(), min_size=1, max_size=3).map(tuple)) if graded else ()
    silent = not any(len(sequence.logprobs) for sequence in held)
    return draw(
        every_field(
            Trajectory,
            key=every_field(AttemptKey),
            sequences=st.just(held),
            content_digest=st.just(content_digest(held)),
            reward=REWARDS if graded and not judged else st.none(),
            judged=st.just(judged),
            failure=st.just(failure),
            no_grade=st.sampled_from(NoGradeReason).map(str) if no_grade else st.just(""),
            # The policy writes nothing only if the prompt alone was too long.
            stop_reason=st.just(StopReason.CONTEXT_OVERFLOW)
            if graded and silent
            else (stop if graded else st.none() | stop),
            partial_reward=st.none() | REWARDS,
            named_rewards=NAMED_REWARDS if graded and not judged else st.just({}),
            turns=st.lists(every_field(TurnTiming), max_size=3).map(tuple),
            counts=every_field(Counts, tool_errors=NAMED, parse_messages=NAMED),
            facts=every_field(Facts, tool_schema_digest=HEX, prompt_digest=HEX),
            tools=st.sampled_from((b"", b'[{"type": "function"}]')),
            pictures=st.just({}),
        )
    )


NOT_BEFORE = "sequence 1: shares tokens with a parent that is not before it"
BRANCH = SequenceOrigin(SequenceCause.BRANCH, 0, 4)


def branched(**changes: Any) -> Trajectory:
    """A conversation of 6 tokens, and one that takes its first 4 and goes on differently."""
    policy = PolicyId(1, 2, b"f" * 32)
    ids = np.array([5, 6, 7, 8, 9, 10], np.int32)
    whole = Sequence(
        ids,
        (Span(Author.PROMPT, 2), Span(Author.POLICY, 2, policy, 1.0), Span(Author.ENVIRONMENT, 2)),
        np.array([-0.5, -0.25], np.float32),
        experts=make_experts(5),
        messages=encode_messages([ChatMessage("user", 2), ChatMessage("assistant", 6)]),
    )
    others = make_experts(6)
    others[:4] = make_experts(5)[:4]
    branch = Sequence(
        np.array([5, 6, 7, 8, 11, 12], np.int32),
        (Span(Author.PROMPT, 5), Span(Author.POLICY, 1, policy, 1.0)),
        np.array([-0.125], np.float32),
        experts=others,
        messages=encode_messages([ChatMessage("tool", 5), ChatMessage("assistant", 6)]),
        origin=BRANCH,
    )
    held = (whole, replace(branch, **changes))
    return Trajectory(
        AttemptKey("g", 0, 0), "lease", held, content_digest(held), 1.0, stop_reason=StopReason.DONE
    )


def holding(trajectory: Trajectory, *held: Sequence) -> Trajectory:
    return replace(trajectory, sequences=held, content_digest=content_digest(held))


def test_tokens_that_sequences_share_are_sent_and_stored_once() -> None:
    trajectory = branched()
    messages = sent(trajectory)
    assert plain(received(messages)) == plain(trajectory)
    chunks = [pb.SubmitTrajectoryRequest.FromString(message).chunk for message in messages[1:]]
    assert [len(chunk.token_ids) for chunk in chunks] == [4 * 6, 4 * 2]
    assert [len(chunk.experts) for chunk in chunks] == [5 * 6 * 2, 2 * 6 * 2]
    stored = array_bytes(trajectory)
    assert len(stored) == sum(
        len(data)
        for chunk in chunks
        for data in (chunk.token_ids, chunk.logprobs, chunk.experts, chunk.messages)
    )
    restored = restore_trajectory(
        trajectory.key, 1.0, None, trajectory.content_digest, summary_json(trajectory), stored
    )
    assert plain(restored) == plain(trajectory)


def test_a_branch_of_one_token_has_the_experts_of_its_parent() -> None:
    """Those of its own token are unknown: the engine has not read it."""
    whole, branch = branched().sequences
    ids, experts = branch.token_ids[:5], make_experts(4)
    spans = (Span(Author.PROMPT, 4), Span(Author.POLICY, 1, PolicyId(1, 2, b"f" * 32), 1.0))
    one = replace(branch, token_ids=ids, spans=spans, experts=experts, messages=b"")
    trajectory = holding(branched(), whole, one)
    assert plain(received(sent(trajectory))) == plain(trajectory)
    header = pb.SubmitTrajectoryRequest.FromString(sent(trajectory)[0])
    announced = TrajectoryAssembler(header, LIMITS).announced_bytes
    # All that it holds once they are joined.
    assert announced >= sum(
        each.experts.nbytes for each in (whole, one) if each.experts is not None
    )
    fewer = holding(trajectory, whole, replace(one, experts=experts[:3]))
    with pytest.raises(MalformedRequestError, match="experts of 3 tokens, fewer than the shared 4"):
        received(sent(fewer))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"origin": replace(BRANCH, parent=1)},
            "sequence 1: shares tokens with a parent that is not before it",
        ),
        (
            {"origin": replace(BRANCH, parent=None)},
            "sequence 1: shares tokens with a parent that is not before it",
        ),
        ({"origin": replace(BRANCH, shared=6)}, "sequence 1: has no token of its own"),
        ({"messages": b"[]!"}, "sequence 1: messages: "),
        ({"messages": encode_messages([ChatMessage("user", 3)])}, "ends at token 3, not within 4"),
        ({"messages": encode_messages([ChatMessage("user", 5)])}, "cover tokens up to 5; there"),
        (
            {
                "spans": (Span(Author.PROMPT, 3), Span(Author.ENVIRONMENT, 3)),
                "logprobs": np.zeros(0),
            },
            "shares 4 tokens, of which only 3 are its prompt",
        ),
    ],
)
def test_a_sequence_that_does_not_fit_its_parent_or_its_messages_is_refused(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(MalformedRequestError, match=problem):
        received(sent(branched(**changes)))


def test_a_parent_shares_no_more_than_it_has() -> None:
    trajectory = branched()
    whole, branch = trajectory.sequences
    short = replace(
        whole,
        token_ids=whole.token_ids[:3],
        spans=(Span(Author.PROMPT, 3),),
        logprobs=np.zeros(0, np.float32),
        experts=None,
        messages=b"",
    )
    with pytest.raises(MalformedRequestError, match="shares 4 tokens of 3 of its parent"):
        received(
            sent(
                replace(
                    trajectory,
                    sequences=(short, branch),
                    content_digest=content_digest((short, branch)),
                )
            )
        )
    bare = replace(whole, experts=None)
    with pytest.raises(MalformedRequestError, match="its parent has none of the shared tokens"):
        received(
            sent(
                replace(
                    trajectory,
                    sequences=(bare, branch),
                    content_digest=content_digest((bare, branch)),
                )
            )
        )


def test_more_tools_and_messages_than_are_kept_are_refused() -> None:
    for tools in (b"\xff\xfe", b"{}", b"[1]", b"[" * 100_000):
        with pytest.raises(MalformedRequestError, match="tools: "):
            received(sent(replace(branched(), tools=tools)))
    assert received(sent(replace(branched(), tools=b'[{"a": 1}]'))).tools == b'[{"a": 1}]'
    trajectory = replace(branched(), tools=b"x" * (MOST_TOOLS_BYTES + 1))
    with pytest.raises(MalformedRequestError, match="524289 bytes of tools; at most 524288"):
        received(sent(trajectory))
    header = pb.SubmitTrajectoryRequest.FromString(sent(branched())[0])
    header.header.sequences[1].messages_bytes = MOST_MESSAGES_BYTES + 1
    with pytest.raises(MalformedRequestError, match="sequence 1: 4194305 bytes of messages"):
        received([header.SerializeToString()])


def sent(trajectory: Trajectory) -> list[bytes]:
    return [
        part.SerializeToString(deterministic=True)  # pyright: ignore[reportCallIssue]
        for part in encode_submission(trajectory)
    ]


def received(messages: list[bytes], limits: TokenLimits = LIMITS) -> Trajectory:
    first, *chunks = map(pb.SubmitTrajectoryRequest.FromString, messages)
    assembly = TrajectoryAssembler(first, limits)
    for chunk in chunks:
        assembly.add_chunk(chunk)
    return assembly.build_trajectory()


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """Return comparable values of all fields; policies are equal only with fingerprints."""
    arrays = [
        [None if array is None else array.tolist() for array in held]
        for s in trajectory.sequences
        for held in [(s.token_ids, s.logprobs, s.experts, s.candidates)]
    ]
    none: dict[str, Any] = {"token_ids": 0, "logprobs": 0, "experts": None, "candidates": None}
    bare = [replace(s, **none) for s in trajectory.sequences]
    return {**asdict(replace(trajectory, sequences=tuple(bare))), "arrays": arrays}


# The comparison names the field that is lost; shrinking what surrounds it takes minutes.
@settings(max_examples=examples(60), deadline=None, phases=[Phase.generate])
@given(trajectories())
def test_a_trajectory_comes_back_with_every_field(trajectory: Trajectory) -> None:
    assert plain(received(sent(trajectory))) == plain(trajectory)


def test_long_arrays_travel_in_chunks() -> None:
    count = CHUNK_BYTES // 4 + 1
    spans = (Span(Author.PROMPT, 1), Span(Author.POLICY, count - 1, PolicyId(1, 1), 1.0))
    sequence = Sequence(np.arange(count) % 1000, spans, -np.ones(count - 1, np.float32))
    long = Trajectory(
        *(AttemptKey("g", 0, 0), "l", (sequence,), content_digest((sequence,))),
        reward=1.0,
        stop_reason=StopReason.DONE,
    )
    messages = sent(long)
    # Token ids are one more than fits; their logprobs fit.
    assert len(messages) == 4 and max(map(len, messages)) < CHUNK_BYTES + 100
    assert plain(received(messages)) == plain(long)


def with_media(*media: Media) -> Trajectory:
    spans = (Span(Author.PROMPT, 1), Span(Author.POLICY, 1, PolicyId(1, 1), 1.0))
    sequence = Sequence(np.arange(2), spans, -np.ones(1, np.float32), media)
    return Trajectory(
        *(AttemptKey("g", 0, 0), "l", (sequence,), content_digest((sequence,))),
        reward=1.0,
        stop_reason=StopReason.DONE,
    )


def test_media_of_half_a_megabyte_travel_and_more_are_refused() -> None:
    full = kept(Media("", "text/plain", content=b"x" * MOST_MEDIA_BYTES))
    rest = kept(Media("", "text/plain", content=b"y"))
    assert plain(received(sent(with_media(full)))) == plain(with_media(full))
    with pytest.raises(MalformedRequestError, match="524289 bytes of media; at most 524288"):
        received(sent(with_media(full, rest)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sha256": "00" * 32}, r"media\[1\] does not match its sha256"),
        ({"size_bytes": 99}, r"media\[1\] is sent in part, 5 of 99 bytes"),
    ],
)
def test_media_that_differ_from_their_description_are_refused(
    changes: dict[str, Any], error: str
) -> None:
    first, second = (kept(Media("", "text/plain", content=text)) for text in (b"one", b"other"))
    with pytest.raises(MalformedRequestError, match=error):
        received(sent(with_media(first, replace(second, **changes))))


def test_media_that_do_not_come_are_refused() -> None:
    header, chunk = sent(with_media(kept(Media("", "text/plain", content=b"all of it"))))
    without = pb.SubmitTrajectoryRequest.FromString(chunk)
    assert without.chunk.media == b"all of it"
    without.chunk.ClearField("media")
    with pytest.raises(MalformedRequestError, match=r"sequence 0: .*media"):
        received([header, without.SerializeToString()])


def with_experts(experts: Experts | None, policy_tokens: int = 3) -> Trajectory:
    """Return an attempt of one prompt token and `policy_tokens` more."""
    spans = (Span(Author.PROMPT, 1), Span(Author.POLICY, policy_tokens, PolicyId(1, 1), 1.0))
    ids, logprobs = np.arange(policy_tokens + 1), -np.ones(policy_tokens, np.float32)
    sequence = Sequence(ids, spans, logprobs, experts=experts)
    return Trajectory(
        *(AttemptKey("g", 0, 0), "l", (sequence,), content_digest((sequence,))),
        reward=1.0,
        stop_reason=StopReason.DONE,
    )


@pytest.mark.parametrize("experts", [256, 257])
def test_experts_take_no_more_bytes_than_their_number_needs(experts: int) -> None:
    limits = replace(LIMITS, experts=replace(EXPERTS, experts=experts))
    tokens = CHUNK_BYTES // 6 + 1
    made = with_experts(make_experts(tokens, experts), policy_tokens=tokens)
    messages = sent(made)
    size = 1 if experts == 256 else 2
    # Token ids and logprobs take a chunk and a third; the header is the other.
    assert len(messages) == 2 + size + 1
    found = received(messages, limits)
    assert plain(found) == plain(made)
    held = found.sequences[0].experts
    assert held is not None
    assert held.itemsize == size


@pytest.mark.parametrize(
    ("experts", "limits", "error"),
    [
        (make_experts(3), replace(LIMITS, experts=None), "policy.routing_replay is off"),
        (make_experts(3)[:, :2], LIMITS, "2 experts a token in 2 layers; .* chooses 2 in 3"),
        (make_experts(3)[:, :, :1], LIMITS, "1 experts a token in 3 layers; .* chooses 2 in 3"),
        (make_experts(5), LIMITS, "experts of 5 tokens; there are 4"),
        (make_experts(3) + np.uint16(299), LIMITS, r"an expert is outside 0\.\.299"),
        (make_experts(3).astype(np.uint8), LIMITS, "18 bytes for 36 bytes of experts"),
    ],
)
def test_experts_of_another_model_are_refused(
    experts: Experts, limits: TokenLimits, error: str
) -> None:
    with pytest.raises(MalformedRequestError, match=f"sequence 0: .*{error}"):
        received(sent(with_experts(experts)), limits)


def test_experts_that_have_changed_on_the_way_are_refused() -> None:
    *rest, chunk = sent(with_experts(make_experts(3)))
    changed = pb.SubmitTrajectoryRequest.FromString(chunk)
    changed.chunk.experts = bytes(reversed(changed.chunk.experts))
    with pytest.raises(MalformedRequestError, match="content_digest does not match"):
        received([*rest, changed.SerializeToString()])


def with_candidates(candidates: Any) -> Trajectory:
    """Return an attempt of one prompt token and the tokens 1, 2 and 3."""
    bare = with_experts(None)
    chosen = np.array(candidates, np.int32)
    return holding(bare, replace(bare.sequences[0], candidates=chosen))


def test_candidates_take_four_bytes_each_and_only_where_there_are_any() -> None:
    held = [[1, 5, -1], [4, 2, 0], [3, -1, -1]]
    made, bare = with_candidates(held), with_experts(None)
    chunks = [pb.SubmitTrajectoryRequest.FromString(sent(one)[1]).chunk for one in (made, bare)]
    assert [len(chunk.candidates) for chunk in chunks] == [36, 0]
    assert plain(received(sent(made))) == plain(made)
    assert len(array_bytes(made)) == len(array_bytes(bare)) + 36
    assert made.content_digest != bare.content_digest


@pytest.mark.parametrize(
    ("candidates", "problem"),
    [
        ([[1, 5], [4, 0], [3, 1]], "a sampled token is not among its candidates"),
        ([[-1, -1], [2, 0], [3, 1]], "a sampled token is not among its candidates"),
        ([[1, 5], [2, 2], [3, 1]], "candidates must differ, and -1 only follow them"),
        ([[1, 5], [-1, 2], [3, 1]], "candidates must differ, and -1 only follow them"),
        ([[1, 5], [2, 100_000], [3, 1]], r"a candidate is outside 0\.\.99999"),
        ([[1, 5], [2, -2], [3, 1]], r"a candidate is outside 0\.\.99999"),
        ([[1, 5], [2, 4]], "16 bytes for 2 candidates of 3 tokens"),
        ([[*range(65)]] * 3, "65 candidates of a token; at most 64"),
    ],
)
def test_candidates_that_nothing_can_be_sampled_from_are_refused(
    candidates: list[list[int]], problem: str
) -> None:
    with pytest.raises(MalformedRequestError, match=f"sequence 0: {problem}"):
        received(sent(with_candidates(candidates)))


def test_the_digest_is_xxh3_over_all_arrays_in_their_order() -> None:
    ids, scores = np.array([1, -2], ">i4"), np.array([-0.5], ">f8")
    spans = (Span(Author.PROMPT, 1), Span(Author.POLICY, 1, PolicyId(1, 1), 1.0))
    sequence = Sequence(ids, spans, scores, experts=make_experts(1))  # pyright: ignore[reportArgumentType]
    wire = struct.pack("<iif", 1, -2, -0.5) + make_experts(1).astype("<u2").tobytes()
    assert content_digest((sequence, sequence)) == xxhash.xxh3_128_digest(wire + wire)
    # As xxHash's own tests have it of no bytes at all.
    assert content_digest(()).hex() == "99aa06d3014798d86001c324468d497f"


def lease(task_json: str) -> Lease:
    durations = {"group_deadline_s": 1.0, "lease_ttl_s": 1.0}
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_tries": 1}
    names = {"lease_id": "lease-9", "group_id": "g-1", "task_json": task_json}
    policies = {"min_policy": None, "exact_policy": None}
    rest: dict[str, Any] = {**durations, **sampling, **names, **policies}
    return Lease(attempts=(), purpose=Purpose.TRAIN, **rest)


def test_the_bytes_of_a_submission_are_those_recorded() -> None:
    """A change of the recording is a change of what others must understand."""
    lines = (Path(__file__).parent / "submissions.hex").read_text().splitlines()
    task = lease('{"env_key": "booking", "task_key": "book-1"}')
    made = [
        f"{name} {message.hex()}"
        for name, trajectory in recorded_tries().items()
        for message in sent(make_submission(trajectory, task, "worker-4"))
    ]
    assert made == lines


def recorded_tries() -> dict[str, Trajectory]:
    grade = Grade(0.75, None, "almost", 0.5, ("a", "b"), ("c",), suspicion="printed RESULT")
    unknown = Grade(reason=NoGradeReason.JUDGE_ERROR, detail="boom", checks_passed=("a",))
    failed = make_failed_trajectory(
        AttemptKey("g-1", 4, 2), AttemptState(0.0), FailureKind.ENV_LOST, "gone"
    )
    return {
        "graded": make_finished_trajectory(
            AttemptKey("g-1", 2, 1), played_state(), StopReason.MAX_TURNS, grade
        ),
        "no_grade": make_finished_trajectory(
            AttemptKey("g-1", 3, 0), played_state(), StopReason.DONE, unknown
        ),
        "failed": failed,
        "to_be_judged": make_finished_trajectory(
            AttemptKey("g-1", 5, 0), played_state(), StopReason.DONE, Grade(to_be_judged=True)
        ),
    }


def played_state() -> AttemptState:
    """An attempt that two policies wrote, with something of everything."""
    first = PolicyId(3, 7, bytes(range(32)))
    second = PolicyId(3, 8, bytes(range(32, 64)))
    transcript = Transcript([5, 6])
    tokens, logprobs = np.array([70000, 8, 9], np.int32), np.array([-0.5, -1.25, -0.1], np.float32)
    spans = (PolicySpan(first, 1), PolicySpan(second, 2))
    transcript.add_completion(Completion(tokens, logprobs, spans, cut=False), 0.7)
    transcript.add_observation([10])
    return AttemptState(
        0.0,
        transcript=transcript,
        counts=Counts(
            turns=2,
            tool_calls=3,
            tool_errors={"bad_tool": 1, "tool_error": 2},
            parse_errors=4,
            repeats=5,
            open_s=0.125,
            grade_s=1.5,
            tools=6,
            malformed_turns=7,
            parse_messages={"no name": 8},
            unknown_tools={"fly": 9},
        ),
        turns=[TurnTiming(0.5, 0.25, 10, 5), TurnTiming(2.000000001, 0.0, 20, 6)],
        info=EpisodeInfo("e-1", (), PromptFacts("p", "", {}), "i-1", "env-2", "data-3", 60.0),
        digests={"tool_schema_digest": "01" * 32, "prompt_digest": "02" * 32},
    )
