"""The learner's TrainingService."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from flotilla.learner.v1 import training_service_pb2 as pb
from flotilla.learner.v1 import training_service_pb2_grpc as pb_grpc
from flotilla_tinker.adapters.peer_errors import peer_errors
from flotilla_tinker.ports import Unavailable
from flotilla_tinker.types import (
    AdamSettings,
    BaseFacts,
    LossBatch,
    LossResult,
    LossSequence,
    ModelSettings,
)

if TYPE_CHECKING:
    from flotilla.learner.v1.training_service_pb2_grpc import TrainingServiceAsyncStub

# A frozen or absent peer is noticed sooner, by the channel; these bound a peer that answers
# pings but not calls.
DESCRIBE_TIMEOUT_S = 10.0
MODEL_TIMEOUT_S = 600.0
TRAIN_TIMEOUT_S = 3600.0
# Arrays of one message, in bytes; a message may have a little more than 1 MiB.
_CHUNK = 2**19


class GrpcTrainingPeer:
    """TrainingPeer over a channel.

    No call waits for an absent peer: it is Unavailable at once, and its caller waits."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cast("TrainingServiceAsyncStub", pb_grpc.TrainingServiceStub(channel))

    async def describe_base(self) -> BaseFacts:
        with peer_errors():
            answer = await self._stub.DescribeBase(
                pb.DescribeBaseRequest(), timeout=DESCRIBE_TIMEOUT_S, wait_for_ready=False
            )
        return BaseFacts(
            model=answer.model,
            max_model_len=answer.max_model_len,
            vocabulary=answer.vocabulary,
            max_rank=answer.max_rank,
            max_models=answer.max_models,
            losses=list(answer.losses),
            models=dict(answer.models),
        )

    async def create_model(self, model_id: str, settings: ModelSettings) -> int:
        request = pb.CreateModelRequest(
            model_id=model_id,
            lora_rank=settings.lora_rank,
            seed=settings.seed,
            train_attention=settings.train_attention,
            train_mlp=settings.train_mlp,
        )
        with peer_errors():
            answer = await self._stub.CreateModel(
                request, timeout=MODEL_TIMEOUT_S, wait_for_ready=False
            )
        return answer.operation

    async def delete_model(self, model_id: str) -> None:
        request = pb.DeleteModelRequest(model_id=model_id)
        with peer_errors():
            await self._stub.DeleteModel(request, timeout=MODEL_TIMEOUT_S, wait_for_ready=False)

    async def forward_backward(self, model_id: str, number: int, batch: LossBatch) -> LossResult:
        parts = list[bytes]()
        metrics = dict[str, float]()
        goes_on = False
        with peer_errors():
            call = self._stub.ForwardBackward(
                _loss_requests(_operation(model_id, number), batch),
                timeout=TRAIN_TIMEOUT_S,
                wait_for_ready=False,
            )
            try:
                async for answer in call:
                    more = list(answer.logprobs)
                    if goes_on and more:
                        parts[-1] += more.pop(0)
                    parts += more
                    goes_on = answer.continued
                    metrics.update(answer.metrics)
            finally:
                call.cancel()
        return LossResult(_logprobs_of(parts, batch.sequences), metrics)

    async def apply_update(
        self, model_id: str, number: int, settings: AdamSettings
    ) -> Mapping[str, float]:
        request = pb.ApplyUpdateRequest(
            operation=_operation(model_id, number),
            learning_rate=settings.learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            grad_clip_norm=settings.grad_clip_norm,
        )
        with peer_errors():
            answer = await self._stub.ApplyUpdate(
                request, timeout=TRAIN_TIMEOUT_S, wait_for_ready=False
            )
        return dict(answer.metrics)

    async def save_state(self, model_id: str, number: int, folder: str) -> int:
        request = pb.SaveStateRequest(operation=_operation(model_id, number), folder=folder)
        with peer_errors():
            answer = await self._stub.SaveState(
                request, timeout=TRAIN_TIMEOUT_S, wait_for_ready=False
            )
        return answer.total_bytes

    async def load_state(
        self, model_id: str, number: int, folder: str, *, with_optimizer: bool
    ) -> None:
        request = pb.LoadStateRequest(
            operation=_operation(model_id, number), folder=folder, with_optimizer=with_optimizer
        )
        with peer_errors():
            await self._stub.LoadState(request, timeout=TRAIN_TIMEOUT_S, wait_for_ready=False)

    async def export_weights(self, model_id: str, number: int, folder: str) -> int:
        request = pb.ExportWeightsRequest(operation=_operation(model_id, number), folder=folder)
        with peer_errors():
            answer = await self._stub.ExportWeights(
                request, timeout=TRAIN_TIMEOUT_S, wait_for_ready=False
            )
        return answer.total_bytes


def _operation(model_id: str, number: int) -> pb.Operation:
    return pb.Operation(model_id=model_id, number=number)


def _loss_requests(
    operation: pb.Operation, batch: LossBatch
) -> Iterator[pb.ForwardBackwardRequest]:
    """Yield the messages of a batch, each below the size that a message may have."""
    request = pb.ForwardBackwardRequest(
        operation=operation,
        loss=batch.loss,
        loss_options=batch.options,
        forward_only=batch.forward_only,
        count=len(batch.sequences),
    )
    filled = 0
    for part in (part for sequence in batch.sequences for part in _sequence_parts(sequence)):
        size = part.ByteSize()
        if filled and filled + size > _CHUNK:
            yield request
            request, filled = pb.ForwardBackwardRequest(), 0
        request.sequences.append(part)
        filled += size
    yield request


def _sequence_parts(sequence: LossSequence) -> Iterator[pb.LossSequence]:
    """Yield a sequence in parts that fit into messages."""
    targets, count = sequence.target_ids, len(sequence.token_ids)
    width = targets.shape[1] if targets.ndim == 2 else 1
    # int32, and for each target int64 and float32s.
    position_bytes = 4 + width * (8 + 4 * len(sequence.inputs))
    step = max(1, _CHUNK // position_bytes)
    for start in range(0, count, step):
        part = slice(start, start + step)
        yield pb.LossSequence(
            token_ids=sequence.token_ids[part].astype("<i4", copy=False).tobytes(),
            target_ids=targets[part].astype("<i8", copy=False).tobytes(),
            targets=width,
            inputs={
                name: values[part].astype("<f4", copy=False).tobytes()
                for name, values in sequence.inputs.items()
            },
            continued=start + step < count,
        )


def _logprobs_of(
    parts: Sequence[bytes], sequences: Sequence[LossSequence]
) -> list[NDArray[np.float32]]:
    """Return each sequence's logprobs. Raises Unavailable if the trainer's answer has others."""
    fits = len(parts) == len(sequences) and all(
        len(part) == 4 * sequence.target_ids.size
        for part, sequence in zip(parts, sequences, strict=True)
    )
    if not fits:
        raise Unavailable(f"the trainer's answer does not fit its {len(sequences)} sequences")
    return [
        np.frombuffer(part, "<f4").reshape(sequence.target_ids.shape)
        for part, sequence in zip(parts, sequences, strict=True)
    ]
