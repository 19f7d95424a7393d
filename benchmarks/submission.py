"""A trajectory of a tool-using policy, encoded for the wire and decoded."""

from collections.abc import Sequence

import numpy as np

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.messages import ChatCall, ChatMessage, TokenText, encode_messages
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.domain.trajectory import Trajectory, TurnTiming, content_digest
from flotilla_common.wire.trajectory import encode_submission
from flotilla_learner.api.decode import TrajectoryAssembler
from flotilla_learner.api.sequence_decode import TokenLimits

TOKENS, TURNS, PROMPT, OBSERVATION = 16_384, 12, 1_024, 400
VOCABULARY = 151_936
POLICY = PolicyId(1, 3, b"f" * 16)
LIMITS = TokenLimits(vocab_size=VOCABULARY, max_tokens=2**17)


def make_trajectory(tokens: int = TOKENS) -> Trajectory:
    chosen = np.random.default_rng(0)
    prompt, observation = PROMPT * tokens // TOKENS, OBSERVATION * tokens // TOKENS
    written = (tokens - prompt - TURNS * observation) // TURNS
    turn = (Span(Author.POLICY, written, POLICY, 1.0), Span(Author.ENVIRONMENT, observation))
    last = Span(Author.ENVIRONMENT, tokens - prompt - TURNS * (written + observation))
    spans = (Span(Author.PROMPT, prompt), *(turn * TURNS), *((last,) if last.length else ()))
    token_ids = chosen.integers(0, VOCABULARY, tokens, dtype=np.int32)
    logprobs = -chosen.exponential(0.5, TURNS * written).astype(np.float32)
    sequence = Sampled(token_ids, spans, logprobs, messages=make_messages(spans))
    return Trajectory(
        key=AttemptKey("group", 0, 0),
        lease_id="lease",
        sequences=(sequence,),
        content_digest=content_digest((sequence,)),
        reward=1.0,
        stop_reason=StopReason.DONE,
        turns=(TurnTiming(1.0, 0.5, prompt, written),) * TURNS,
    )


def make_messages(spans: Sequence[Span]) -> bytes:
    """Return the messages of the turns: some thinking, and a call with its answer in each."""
    told, end = list[ChatMessage](), 0
    call = '{"origin": "SFO", "destination": "NYC", "date": "2026-11-02", "passengers": 2}'
    for span in spans:
        begin, end = end, end + span.length
        inside = TokenText(begin + 4, end - 8) if span.length > 12 else ""
        if span.author is Author.PROMPT:
            middle = (begin + end) // 2
            told.append(ChatMessage("system", middle, TokenText(4, middle - 8), by_template=True))
            told.append(ChatMessage("user", end, TokenText(middle, end - 8)))
        elif span.author is Author.POLICY:
            calls = (ChatCall(f"call_{len(told)}_0", "search_flights", call),)
            told.append(ChatMessage("assistant", end, "", inside, calls))
        else:
            named = [each.id for each in told[-1].calls] or [""]
            told.append(ChatMessage("tool", end, inside, call_id=named[0]))
    return encode_messages(told)


def encode_trajectory(trajectory: Trajectory) -> list[bytes]:
    """Return the messages of a submission, including the digest made with a trajectory."""
    assert content_digest(trajectory.sequences) == trajectory.content_digest
    return [part.SerializeToString() for part in encode_submission(trajectory)]


def decode_messages(messages: list[bytes]) -> Trajectory:
    """Return the trajectory of a submission, after all of the learner's checks."""
    first, *chunks = map(pb.SubmitTrajectoryRequest.FromString, messages)
    assembler = TrajectoryAssembler(first, LIMITS)
    for chunk in chunks:
        assembler.add_chunk(chunk)
    return assembler.build_trajectory()
