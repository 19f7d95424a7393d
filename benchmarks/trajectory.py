"""CPU of a trajectory on the wire over msgspec's: `python -m benchmarks.trajectory`.

A trajectory of 16,384 tokens in 12 turns is encoded as rollouts submit it, and decoded as the
learner takes it, every check and digest included: from arrays to arrays. The other side is a
msgspec struct of lists, as prime-rl sends its samples: token ids, mask, logprobs and temperatures
of every token. The last line is one JSON object:

- `cpu`: CPU seconds of ours over those of msgspec with its lists made into arrays, the median of
  the pairs; `cpu_encode` and `cpu_decode` are its parts.
- `cpu_over_lists`: the same without the arrays.
- `bytes`: bytes of ours over those of msgspec.

About 10 seconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from flotilla.learner.v1 import group_service_pb2 as pb
from services.common.domain.attempts import AttemptKey, StopReason
from services.common.domain.policy import PolicyId
from services.common.domain.trajectory import Author, Span, Trajectory, TurnTiming, content_digest
from services.common.domain.trajectory import Sequence as Sampled
from services.learner.api.decode import TrajectoryAssembler
from services.learner.api.sequence_decode import TokenLimits
from services.wire.trajectory import encode_submission

TOKENS, TURNS, PROMPT, OBSERVATION = 16_384, 12, 1_024, 400
VOCABULARY = 151_936
PAIRS, REPEATS = 15, 20
POLICY = PolicyId(1, 3, b"f" * 16)
LIMITS = TokenLimits(vocab_size=VOCABULARY, max_tokens=TOKENS)


class Sample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """A sample whose tokens are lists."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    reward: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    pairs = parser.parse_args().pairs
    trajectory = make_trajectory()
    print(json.dumps(compare(trajectory, make_sample(trajectory), pairs)))


def compare(trajectory: Trajectory, sample: Sample, pairs: int) -> dict[str, Any]:
    wire, packed = encode_ours(trajectory), msgspec.msgpack.encode(sample)
    check_same(decode_ours(wire), decode_arrays(packed))
    ours, encoded, arrays, lists = list[float](), list[float](), list[float](), list[float]()
    theirs_encoded: list[float] = []
    for _ in range(pairs + 1):
        encoded.append(time_cpu(lambda: encode_ours(trajectory)))
        ours.append(time_cpu(lambda: decode_ours(wire)))
        theirs_encoded.append(time_cpu(lambda: msgspec.msgpack.encode(sample)))
        arrays.append(time_cpu(lambda: decode_arrays(packed)))
        lists.append(time_cpu(lambda: msgspec.msgpack.decode(packed, type=Sample)))
    both = list(map(sum, zip(encoded, ours, strict=True)))
    return {
        "cpu": median_ratio(both, list(map(sum, zip(theirs_encoded, arrays, strict=True)))),
        "cpu_encode": median_ratio(encoded, theirs_encoded),
        "cpu_decode": median_ratio(ours, arrays),
        "cpu_over_lists": median_ratio(
            both, list(map(sum, zip(theirs_encoded, lists, strict=True)))
        ),
        "bytes": round(sum(map(len, wire)) / len(packed), 3),
        "tokens_per_cpu_s": round(TOKENS / statistics.median(both)),
    }


def make_trajectory(tokens: int = TOKENS) -> Trajectory:
    chosen = np.random.default_rng(0)
    prompt, observation = PROMPT * tokens // TOKENS, OBSERVATION * tokens // TOKENS
    written = (tokens - prompt - TURNS * observation) // TURNS
    turn = (Span(Author.POLICY, written, POLICY, 1.0), Span(Author.ENVIRONMENT, observation))
    last = Span(Author.ENVIRONMENT, tokens - prompt - TURNS * (written + observation))
    spans = (Span(Author.PROMPT, prompt), *(turn * TURNS), *((last,) if last.length else ()))
    token_ids = chosen.integers(0, VOCABULARY, tokens, dtype=np.int32)
    logprobs = -chosen.exponential(0.5, TURNS * written).astype(np.float32)
    sequence = Sampled(token_ids, spans, logprobs)
    return Trajectory(
        key=AttemptKey("group", 0, 0),
        lease_id="lease",
        sequences=(sequence,),
        content_digest=content_digest((sequence,)),
        reward=1.0,
        stop_reason=StopReason.DONE,
        turns=(TurnTiming(1.0, 0.5, prompt, written),) * TURNS,
    )


def make_sample(trajectory: Trajectory) -> Sample:
    sequence = trajectory.sequences[0]
    by_policy = [span.author is Author.POLICY for span in sequence.spans]
    mask = np.repeat(by_policy, [span.length for span in sequence.spans])
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = sequence.logprobs
    return Sample(
        token_ids=sequence.token_ids.tolist(),
        mask=mask.tolist(),
        logprobs=logprobs.tolist(),
        temperatures=[1.0] * len(mask),
        env_name="booking",
        reward=trajectory.reward,
    )


def encode_ours(trajectory: Trajectory) -> list[bytes]:
    sequences = trajectory.sequences
    assert content_digest(sequences) == trajectory.content_digest
    return [part.SerializeToString() for part in encode_submission(trajectory)]


def decode_ours(wire: list[bytes]) -> Trajectory:
    assembler = TrajectoryAssembler(LIMITS)
    for message in wire:
        assembler.add_part(pb.SubmitTrajectoryRequest.FromString(message))
    return assembler.build_trajectory()


def decode_arrays(packed: bytes) -> tuple[np.ndarray, ...]:
    sample = msgspec.msgpack.decode(packed, type=Sample)
    return (
        np.array(sample.token_ids, np.int32),
        np.array(sample.mask, np.bool_),
        np.array(sample.logprobs, np.float32),
        np.array(sample.temperatures, np.float32),
    )


def check_same(trajectory: Trajectory, arrays: tuple[np.ndarray, ...]) -> None:
    token_ids, mask, logprobs, _ = arrays
    sequence = trajectory.sequences[0]
    assert np.array_equal(sequence.token_ids, token_ids)
    assert np.array_equal(sequence.logprobs, logprobs[mask])


def time_cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, of many."""
    began = time.process_time()
    for _ in range(REPEATS):
        work()
    return (time.process_time() - began) / REPEATS


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the pairs; the first pair warms both."""
    ratios = [one / other for one, other in zip(ours[1:], theirs[1:], strict=True)]
    return round(statistics.median(ratios), 4)


if __name__ == "__main__":
    main()
