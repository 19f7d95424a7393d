"""Ways to spoil a good submission, and how each is refused."""

from collections.abc import Callable

import numpy as np

from flotilla.learner.v1 import trajectory_pb2
from tests.support.learner import Submission, make_turns

Spoil = Callable[[Submission], None]
INVALID = ("INVALID_ARGUMENT", "MALFORMED_TRAJECTORY")
LOST = ("NOT_FOUND", "LEASE_LOST")
UNKNOWN = ("FAILED_PRECONDITION", "UNKNOWN_POLICY")
# gRPC itself refuses a message over the limit of 1 MiB.
TOO_LARGE = ("RESOURCE_EXHAUSTED", "")


def logprobs(s: Submission, values: object, dtype: str = "<f4") -> None:
    s.logprobs[0] = np.asarray(values, dtype=dtype).tobytes()


def token_ids(s: Submission, values: object, dtype: str = "<i4") -> None:
    s.token_ids[0] = np.asarray(values, dtype=dtype).tobytes()


def one_logprob(s: Submission, value: float) -> None:
    logprobs(s, [-1.0, -1.0, value, -1.0, -1.0])


def one_token(s: Submission, value: int) -> None:
    token_ids(s, [1, 2, 3, value, 5, 6, 7, 8])


def span_lengths(s: Submission, *lengths: int) -> None:
    s.header.sequences[0].spans.lengths[:] = lengths


def only_the_prompt(s: Submission) -> None:
    spans = trajectory_pb2.Spans(authors=[trajectory_pb2.AUTHOR_PROMPT], lengths=[8])
    s.header.sequences[0].CopyFrom(trajectory_pb2.SequenceHeader(token_count=8, spans=spans))
    s.logprobs[0] = b""


def no_sequence(s: Submission) -> None:
    del s.header.sequences[:]
    s.token_ids, s.logprobs = [], []


def no_token(s: Submission) -> None:
    s.header.sequences[0].CopyFrom(trajectory_pb2.SequenceHeader())
    s.token_ids, s.logprobs = [], []


def unknown_tools(s: Submission, *names: str) -> None:
    s.header.counts.unknown_tools.update(dict.fromkeys(names, 1))


def too_long(s: Submission, count: int) -> None:
    s.header.sequences[0].token_count = count
    s.header.sequences[0].spans.lengths[0] += count - 8
    token_ids(s, [1] * min(count, 200))


def versions(s: Submission, first: int, second: int) -> None:
    """The policy's two spans are of these versions."""
    spans = s.header.sequences[0].spans
    spans.writers.add().CopyFrom(spans.writers[0])
    spans.writers[0].policy.version, spans.writers[1].policy.version = first, second
    spans.writer_indexes[1] = 1


def writer(s: Submission, **changes: object) -> None:
    """The writer of both spans with other fields, or without those that are None."""
    one = s.header.sequences[0].spans.writers[0]
    for name, value in changes.items():
        one.ClearField(name) if value is None else setattr(one, name, value)  # pyright: ignore[reportArgumentType]


def writer_indexes(s: Submission, *indexes: int) -> None:
    s.header.sequences[0].spans.writer_indexes[:] = indexes


def more_writers(s: Submission) -> None:
    spans = s.header.sequences[0].spans
    spans.writers.extend([spans.writers[0]] * 2)


def authors(s: Submission, *values: int) -> None:
    s.header.sequences[0].spans.authors[:] = values  # pyright: ignore[reportCallIssue, reportArgumentType]


def turns(s: Submission, count: int) -> None:
    s.header.turns.CopyFrom(make_turns(count))


def turn_seconds(s: Submission, *values: float) -> None:
    turns(s, 2)
    s.header.turns.tools_s[:] = values


def step_reward(s: Submission, value: float, turn: int = 0) -> None:
    turns(s, 2)
    s.header.turns.rewards[turn] = value


def open_seconds(s: Submission, value: float) -> None:
    s.header.counts.open_s = value


def sequences(s: Submission, count: int) -> None:
    s.header.sequences.extend([s.header.sequences[0]] * (count - 1))


def big_endian(s: Submission) -> None:
    s.token_ids[0] = np.frombuffer(s.token_ids[0], "<i4").astype(">i4").tobytes()
    s.logprobs[0] = np.frombuffer(s.logprobs[0], "<f4").astype(">f4").tobytes()


def big_endian_logprobs(s: Submission) -> None:
    s.logprobs[0] = np.frombuffer(s.logprobs[0], "<f4").astype(">f4").tobytes()


CASES: list[tuple[str, Spoil, tuple[str, str]]] = [
    # B17
    ("fewer logprobs than policy tokens", lambda s: logprobs(s, [-1.0] * 4), INVALID),
    ("more logprobs than policy tokens", lambda s: logprobs(s, [-1.0] * 6), INVALID),
    ("a logprob for every token", lambda s: logprobs(s, [-1.0] * 8), INVALID),
    ("fewer token ids than announced", lambda s: token_ids(s, [1] * 7), INVALID),
    ("more token ids than announced", lambda s: token_ids(s, [1] * 40), INVALID),
    # B18
    ("logprobs cut inside a number", lambda s: logprobs(s, [-1] * 19, "i1"), INVALID),
    ("token ids cut inside a number", lambda s: token_ids(s, [1] * 31, "i1"), INVALID),
    # B19
    ("a negative token id", lambda s: one_token(s, -1), INVALID),
    ("a token id beyond the vocabulary", lambda s: one_token(s, 64), INVALID),
    ("the largest token id", lambda s: one_token(s, 2**31 - 1), INVALID),
    # B20
    ("a logprob that is not a number", lambda s: one_logprob(s, float("nan")), INVALID),
    ("an infinite logprob", lambda s: one_logprob(s, float("inf")), INVALID),
    ("a logprob of minus infinity", lambda s: one_logprob(s, float("-inf")), INVALID),
    ("a reward of a step that is not a number", lambda s: step_reward(s, float("nan")), INVALID),
    ("an infinite reward of a step", lambda s: step_reward(s, float("inf")), INVALID),
    ("a reward of a step that was not", lambda s: step_reward(s, 1.0, turn=2), INVALID),
    ("a time of a turn that is not a number", lambda s: turn_seconds(s, 1.0, np.nan), INVALID),
    ("a time too few", lambda s: turn_seconds(s, 1.0), INVALID),
    ("a time to open that is not finite", lambda s: open_seconds(s, np.inf), INVALID),
    ("a positive logprob", lambda s: one_logprob(s, 1e-3), INVALID),
    ("a logprob that no sampled token has", lambda s: one_logprob(s, -1e5), INVALID),
    # B21: the mask is made of the spans' authors.
    ("a span without an author", lambda s: authors(s, 1, 0, 3, 2), INVALID),
    ("a span with an author of its own", lambda s: authors(s, 1, 7, 3, 2), INVALID),
    ("a span of the environment with a policy", lambda s: authors(s, 1, 3, 3, 2), INVALID),
    ("an author too few", lambda s: authors(s, 1, 2, 3), INVALID),
    ("an author too many", lambda s: authors(s, 1, 2, 3, 2, 3), INVALID),
    ("an author too many who is unknown", lambda s: authors(s, 1, 2, 9, 3, 2), INVALID),
    ("a span of the policy without one", lambda s: writer(s, policy=None), INVALID),
    ("a span of the policy without a temperature", lambda s: writer(s, temperature=None), INVALID),
    ("a temperature below 0", lambda s: writer(s, temperature=-1.0), INVALID),
    ("a temperature that is not a number", lambda s: writer(s, temperature=np.nan), INVALID),
    ("a writer that is not there", lambda s: writer_indexes(s, 0, 1), INVALID),
    ("a span of the policy too few", lambda s: writer_indexes(s, 0), INVALID),
    ("more writers than spans", more_writers, INVALID),
    # B22, B23
    ("no token of the policy", only_the_prompt, INVALID),
    ("a grade without a sequence", no_sequence, INVALID),
    ("a sequence without a token", no_token, INVALID),
    # B24: the learner's max_model_len is 128.
    ("a token more than fits", lambda s: too_long(s, 129), INVALID),
    ("four billion tokens", lambda s: too_long(s, 2**32 - 1), INVALID),
    ("counts of too many tools", lambda s: unknown_tools(s, *map(str, range(9))), INVALID),
    ("the count of a tool with an endless name", lambda s: unknown_tools(s, "x" * 201), INVALID),
    # B25
    ("a reward that is not a number", lambda s: setattr(s.header, "reward", np.nan), INVALID),
    ("an infinite reward", lambda s: setattr(s.header, "reward", np.inf), INVALID),
    ("a reward of 1e38", lambda s: setattr(s.header, "reward", 1e38), INVALID),
    # B27
    ("a group that is not the lease's", lambda s: setattr(s.header.key, "group_id", "g9"), LOST),
    ("an unknown lease", lambda s: setattr(s.header, "lease_id", "none"), LOST),
    ("an attempt beyond the group", lambda s: setattr(s.header.key, "attempt_index", 2), INVALID),
    ("a try beyond the last", lambda s: setattr(s.header.key, "try", 99), INVALID),
    # B28, B29
    ("a version of the future", lambda s: versions(s, 0, 9), UNKNOWN),
    ("a version that goes back within a sequence", lambda s: versions(s, 1, 0), INVALID),
    # B30
    ("more turns than may be", lambda s: turns(s, 5000), INVALID),
    ("a million turns", lambda s: turns(s, 10**6), TOO_LARGE),
    ("more sequences than may be", lambda s: sequences(s, 257), INVALID),
    # B31, with the digest of the bytes as they are sent
    ("arrays in big-endian order", big_endian, INVALID),
    ("logprobs in big-endian order", big_endian_logprobs, INVALID),
    # B32: arrays have no type tag; the lengths give another type away.
    ("logprobs in float64", lambda s: logprobs(s, [-1.0] * 5, "<f8"), INVALID),
    ("logprobs in float16", lambda s: logprobs(s, [-1.0] * 5, "<f2"), INVALID),
    ("token ids in int64", lambda s: token_ids(s, [1] * 8, "<i8"), INVALID),
    # B33
    ("spans that do not cover the tokens", lambda s: span_lengths(s, 1, 3, 1, 2), INVALID),
    ("spans that overlap", lambda s: span_lengths(s, 2, 4, 2, 2), INVALID),
    ("an empty span", lambda s: span_lengths(s, 3, 3, 0, 2), INVALID),
    ("a span of four billion tokens", lambda s: span_lengths(s, 2**32 - 1, 3, 1, 2), INVALID),
    ("a digest of something else", lambda s: setattr(s, "digest", b"0" * 32), INVALID),
]
