"""Spans and turns of a trajectory, encoded column by column: separate messages would cost more than
all tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from math import inf, isfinite
from typing import Any

from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import TurnTiming
from flotilla_common.wire.enums import AUTHORS
from flotilla_common.wire.policy import decode_policy

_NO_WRITER = (None, None)
_NEW_SPAN: Callable[[Iterable[Any]], Span] = partial(tuple.__new__, Span)


def span_fields(spans: Items[Span]) -> dict[str, Any]:
    """Return the fields of a Spans message."""
    # Compared as tuples: PolicyIds are equal even if their fingerprints differ.
    sampled = [
        (policy.run_epoch, policy.version, policy.fingerprint, temperature)
        for _, _, policy, temperature in spans
        if policy is not None
    ]
    places = {writer: place for place, writer in enumerate(dict.fromkeys(sampled))}
    return {
        "authors": [AUTHORS.encode(span.author) for span in spans],
        "lengths": [span.length for span in spans],
        "writer_indexes": [places[writer] for writer in sampled],
        "writers": [_writer_fields(*writer) for writer in places],
    }


def _writer_fields(
    run_epoch: int, version: int, fingerprint: bytes, temperature: float | None
) -> dict[str, Any]:
    policy = {"run_epoch": run_epoch, "version": version, "fingerprint": fingerprint}
    return {"policy": policy, "temperature": temperature}


def decode_spans(message: trajectory_pb2.Spans) -> tuple[Span, ...]:
    """Return the spans. Raises ValueError if the columns do not form whole spans."""
    # A slice is a list, which is cheaper than reading each item.
    twins, lengths = message.authors[:], message.lengths[:]
    authors = AUTHORS.find_members(twins)
    if len(authors) != len(lengths) or None in authors or not all(lengths):
        raise ValueError("a span needs an author and a length")
    # Python 3.11 looks up an enum member on each access.
    by_policy = Author.POLICY
    writers = _decode_writers(message, authors.count(by_policy))
    written = [next(writers) if author is by_policy else _NO_WRITER for author in authors]
    policies, temperatures = zip(*written, strict=True) if written else ((), ())
    # Avoids a Python call per span.
    return tuple(map(_NEW_SPAN, zip(authors, lengths, policies, temperatures, strict=True)))


def _decode_writers(message: trajectory_pb2.Spans, count: int) -> Iterator[tuple[PolicyId, float]]:
    """Yield the policy and the temperature of `count` spans. Raises ValueError."""
    indexes, writers = message.writer_indexes[:], message.writers
    if len(indexes) != count or len(writers) > count:
        raise ValueError("only policy spans have a policy and a temperature")
    if count and max(indexes) >= len(writers):
        raise ValueError(f"a span names writer {max(indexes)} of {len(writers)}")
    decoded = [_decode_writer(writer) for writer in writers]
    return iter([decoded[index] for index in indexes])


def _decode_writer(message: trajectory_pb2.Writer) -> tuple[PolicyId, float]:
    if not message.HasField("policy") or not message.HasField("temperature"):
        raise ValueError("a policy span needs a policy and a temperature")
    if not 0 <= message.temperature < inf:
        raise ValueError(f"temperature {message.temperature}")
    return decode_policy(message.policy), message.temperature


def turn_fields(turns: Items[TurnTiming]) -> dict[str, Any]:
    """Return the fields of a Turns message."""
    rewards = {n: turn.reward for n, turn in enumerate(turns) if turn.reward is not None}
    return {
        "generate_s": [turn.generate_s for turn in turns],
        "tools_s": [turn.tools_s for turn in turns],
        "prompt_tokens": [turn.prompt_tokens for turn in turns],
        "generated_tokens": [turn.generated_tokens for turn in turns],
        "thinking_tokens": [turn.thinking_tokens for turn in turns],
        "rewards": rewards or None,
    }


def decode_turns(message: trajectory_pb2.Turns) -> tuple[TurnTiming, ...]:
    """Return the turns. Raises ValueError for incomplete columns and for non-finite values."""
    generate_s, tools_s = message.generate_s[:], message.tools_s[:]
    tokens = (message.prompt_tokens[:], message.generated_tokens[:])
    thinking, rewards = message.thinking_tokens[:], dict(message.rewards)
    count = len(thinking)
    if any(len(column) != count for column in (generate_s, tools_s, *tokens)):
        raise ValueError("the columns of turns differ in length")
    if rewards and max(rewards) >= count:
        raise ValueError(f"a reward belongs to turn {max(rewards)} of {count}")
    _check_finite("generate_s", dict(enumerate(generate_s)))
    _check_finite("tools_s", dict(enumerate(tools_s)))
    _check_finite("reward", rewards)
    rewarded = map(rewards.get, range(count))
    return tuple(map(TurnTiming, generate_s, tools_s, *tokens, rewarded, thinking))


def _check_finite(name: str, numbered: Mapping[int, float]) -> None:
    if all(map(isfinite, numbered.values())):
        return
    number, value = next(item for item in numbered.items() if not isfinite(item[1]))
    raise ValueError(f"turns[{number}].{name} is {value}")
