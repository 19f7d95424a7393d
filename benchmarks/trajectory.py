"""CPU of a trajectory on the wire over msgspec's: `python -m benchmarks.trajectory`.

A trajectory of 12 turns is encoded as by rollouts, and decoded as by the learner, with every check
and digest: from arrays to arrays, and then to the tensors of a training step. The other side is
msgspec as prime-rl uses it (its `transports/batch`): a micro batch of lists with token ids, mask,
advantages, logprobs, positions and temperatures of each token, encoded and decoded as msgpack, and
every list converted to a tensor. The cost of building the sender's arrays or lists does not count.
The last line is one JSON object:

- `cpu`: CPU seconds of ours over those of prime-rl's, the median of the pairs.
- `cpu_without_digests`: the same without our two digests, which the other side lacks.
- `cpu_same_fields`: ours over a msgspec struct with the same fields (token ids, mask, logprobs,
  temperatures), from lists to numpy arrays; ours to arrays, digests included.
- `bytes`: bytes of ours over those of prime-rl's.
- `us`: CPU microseconds of each part; `digest` is in our `encode` once, and in our `decode`.

About 20 seconds.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.submission import TOKENS, decode_messages, encode_trajectory, make_trajectory
from flotilla_common.domain.token_authors import Author, policy_mask
from flotilla_common.domain.trajectory import Trajectory, content_digest

PAIRS, REPEATS = 15, 10
ADVANTAGE = 0.37


class Sample(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """Lists with our trajectory's fields of each token."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    reward: float | None = None


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """Micro batch with the fields that prime-rl always sends, in their order."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]


ENCODER = msgspec.msgpack.Encoder()
BATCHES = msgspec.msgpack.Decoder(list[MicroBatch])
SAMPLES = msgspec.msgpack.Decoder(Sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(compare(make_trajectory(given.tokens), given.pairs)))


def compare(trajectory: Trajectory, pairs: int) -> dict[str, Any]:
    sample = make_sample(trajectory)
    batch = make_batch(sample)
    wire, packed = encode_trajectory(trajectory), ENCODER.encode([batch])
    lists = ENCODER.encode(sample)
    check_same(make_tensors(decode_messages(wire)), batch_tensors(BATCHES.decode(packed)[0]))
    parts: dict[str, Callable[[], object]] = {
        "encode": lambda: encode_trajectory(trajectory),
        "decode": lambda: decode_messages(wire),
        "tensors": lambda: make_tensors(trajectory),
        "digest": lambda: content_digest(trajectory.sequences),
        "msgspec_encode": lambda: ENCODER.encode([batch]),
        "msgspec_decode": lambda: BATCHES.decode(packed),
        "msgspec_tensors": lambda: batch_tensors(batch),
        "fields_encode": lambda: ENCODER.encode(sample),
        "fields_decode": lambda: sample_arrays(SAMPLES.decode(lists)),
    }
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(pairs + 1):
        for name, work in parts.items():
            found[name].append(time_cpu(work))
    return summarise(found, len(trajectory.sequences[0].token_ids)) | {
        "bytes": round(sum(map(len, wire)) / len(packed), 3)
    }


def summarise(found: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    def total(*names: str) -> np.ndarray:
        # The first call of each warms up.
        return np.sum([found[name][1:] for name in names], axis=0)

    def median(ratios: np.ndarray) -> float:
        return round(float(np.median(ratios)), 4)

    ours, digests = total("encode", "decode"), 2 * total("digest")
    tensors = ours + total("tensors")
    theirs = total("msgspec_encode", "msgspec_decode", "msgspec_tensors")
    return {
        "cpu": median(tensors / theirs),
        "cpu_without_digests": median((tensors - digests) / theirs),
        "cpu_same_fields": median(ours / total("fields_encode", "fields_decode")),
        "tokens": tokens,
        "us": {name: round(statistics.median(all_[1:]) * 1e6, 1) for name, all_ in found.items()},
    }


def make_tensors(trajectory: Trajectory) -> list[Tensor]:
    """Return the tensors of a training step."""
    sequence = trajectory.sequences[0]
    mask = policy_mask(sequence.spans)
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = sequence.logprobs
    return [
        torch.from_numpy(sequence.token_ids.astype(np.int64)),
        torch.from_numpy(mask),
        torch.from_numpy(mask * np.float32(ADVANTAGE)),
        torch.from_numpy(logprobs),
        torch.from_numpy(np.arange(len(mask))),
        torch.ones(len(mask)),
    ]


def batch_tensors(batch: MicroBatch) -> list[Tensor]:
    return [
        torch.tensor(batch.input_ids, dtype=torch.long),
        torch.tensor(batch.loss_mask, dtype=torch.bool),
        torch.tensor(batch.advantages, dtype=torch.float),
        torch.tensor(batch.inference_logprobs, dtype=torch.float),
        torch.tensor(batch.position_ids, dtype=torch.long),
        torch.tensor(batch.temperatures, dtype=torch.float),
    ]


def sample_arrays(sample: Sample) -> list[np.ndarray]:
    return [
        np.array(sample.token_ids, np.int32),
        np.array(sample.mask, np.bool_),
        np.array(sample.logprobs, np.float32),
        np.array(sample.temperatures, np.float32),
    ]


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


def make_batch(sample: Sample) -> MicroBatch:
    length = len(sample.token_ids)
    return MicroBatch(
        input_ids=sample.token_ids,
        loss_mask=sample.mask,
        advantages=[ADVANTAGE if chosen else 0.0 for chosen in sample.mask],
        inference_logprobs=sample.logprobs,
        position_ids=list(range(length)),
        sequence_lengths=[length],
        temperatures=sample.temperatures,
        env_names=[sample.env_name],
        seq_lens=[length],
    )


def check_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def time_cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds per call, over many calls."""
    began = time.process_time()
    for _ in range(REPEATS):
        work()
    return (time.process_time() - began) / REPEATS


if __name__ == "__main__":
    main()
