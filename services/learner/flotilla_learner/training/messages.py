"""Batches and scores in messages of the contract, over which a long sequence is spread."""

from collections.abc import AsyncIterator, Iterator

from flotilla.learner.v1 import training_service_pb2 as pb
from flotilla_learner.training.batch_checks import (
    RawSequence,
    SequenceLimits,
    complete_options,
    decode_sequence,
)
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training_types import TargetBatch, TargetScores, TargetSequence

# Logprobs in one response.
_RESPONSE_BYTES = 1 << 19


async def read_batch(
    requests: AsyncIterator[pb.ForwardBackwardRequest], limits: SequenceLimits
) -> tuple[pb.Operation, TargetBatch]:
    """Return the batch of a stream, checked, and its operation. Raises OperationRefused."""
    first: pb.ForwardBackwardRequest | None = None
    options: dict[str, float] = {}
    sequences: list[TargetSequence] = []
    parts: list[pb.LossSequence] = []
    async for request in requests:
        if first is None:
            first = request
            options = complete_options(first.loss, first.loss_options)
        for part in request.sequences:
            parts.append(part)
            if not part.continued:
                raw = _join_parts(parts)
                sequences.append(decode_sequence(len(sequences), raw, first.loss, limits))
                parts = []
    if first is None or parts or not sequences:
        what = "the last sequence is cut off" if parts else "there are no sequences"
        raise OperationRefused("BAD_BATCH", what)
    # gRPC ends the stream of a caller that went away like any other.
    if len(sequences) != first.count:
        what = f"{len(sequences)} sequences, and {first.count} by `count`: the rest is cut off"
        raise OperationRefused("BAD_BATCH", what)
    return first.operation, TargetBatch(first.loss, options, sequences, first.forward_only)


def _join_parts(parts: list[pb.LossSequence]) -> RawSequence:
    names = dict.fromkeys(name for part in parts for name in part.inputs)
    return RawSequence(
        b"".join(part.token_ids for part in parts),
        b"".join(part.target_ids for part in parts),
        parts[0].targets,
        {name: b"".join(part.inputs.get(name, b"") for part in parts) for name in names},
    )


def encode_scores(scores: TargetScores) -> Iterator[pb.ForwardBackwardResponse]:
    """Yield responses of at most `_RESPONSE_BYTES`, the last with the metrics."""
    held: list[bytes] = []
    room = _RESPONSE_BYTES
    for values in scores.logprobs:
        data = values.astype("<f4").tobytes()
        while len(data) > room:
            yield pb.ForwardBackwardResponse(logprobs=[*held, data[:room]], continued=True)
            held, data, room = [], data[room:], _RESPONSE_BYTES
        held.append(data)
        room -= len(data)
    yield pb.ForwardBackwardResponse(logprobs=held, metrics=scores.metrics)
