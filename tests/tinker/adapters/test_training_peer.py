"""The client of TrainingService, against a server of the contract."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from flotilla.learner.v1 import training_service_pb2 as training_pb
from flotilla.learner.v1 import training_service_pb2_grpc as training_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.rpc_options import MAX_MESSAGE_BYTES
from flotilla_tinker.adapters.training_peer import GrpcTrainingPeer
from flotilla_tinker.ports import OrderRefused, OutOfOrder, Unavailable, Unknown
from flotilla_tinker.types import (
    AdamSettings,
    LossBatch,
    LossSequence,
    ModelSettings,
)
from tests.support.fake_peers import TOKEN, served

SIZES = (7, 40_000, 3, 30_000, 1)


class EchoTraining(training_grpc.TrainingServiceServicer):
    """Answers with what it was asked; refuses what it is told to."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.refusal: ServiceError | None = None

    def _note(self, request: Any) -> None:
        self.requests.append(request)
        if self.refusal:
            raise self.refusal

    async def DescribeBase(self, request: Any, context: Any) -> training_pb.DescribeBaseResponse:
        self._note(request)
        return training_pb.DescribeBaseResponse(
            model="tiny", max_rank=8, max_models=3, losses=["ppo"], models={"m": 4}
        )

    async def CreateModel(self, request: Any, context: Any) -> training_pb.CreateModelResponse:
        self._note(request)
        return training_pb.CreateModelResponse(operation=2)

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[training_pb.ForwardBackwardRequest], context: Any
    ) -> AsyncIterator[training_pb.ForwardBackwardResponse]:
        async for request in request_iterator:
            self._note(request)
            for sequence in request.sequences:
                targets = np.frombuffer(sequence.target_ids, "<i8")
                part = (targets / 2).astype("<f4").tobytes()
                yield training_pb.ForwardBackwardResponse(
                    logprobs=[part], continued=sequence.continued
                )
        yield training_pb.ForwardBackwardResponse(metrics={"loss:sum": 2.5})

    async def ApplyUpdate(self, request: Any, context: Any) -> training_pb.ApplyUpdateResponse:
        self._note(request)
        return training_pb.ApplyUpdateResponse(metrics={"grad_norm": 1.5})


def echo_training() -> EchoTraining:
    return EchoTraining()  # pyright: ignore[reportAbstractUsage]


@asynccontextmanager
async def a_channel(training: EchoTraining) -> AsyncGenerator[grpc.aio.Channel]:
    """A channel to a server of the contract."""
    add = partial(training_grpc.add_TrainingServiceServicer_to_server, training)
    async with served(add) as address, rpc.channel(address, token=TOKEN) as channel:
        yield channel


def a_batch(*sizes: int, targets: int = 1) -> LossBatch:
    sequences = list[LossSequence]()
    for size in sizes:
        ids = np.arange(size, dtype=np.int32)
        shape = (size,) if targets == 1 else (size, targets)
        target_ids = np.arange(size * targets, dtype=np.int64).reshape(shape)
        weights = np.ones(shape, np.float32)
        sequences.append(LossSequence(ids, target_ids, {"weights": weights}))
    return LossBatch("cross_entropy", {"beta": 0.05}, sequences)


async def test_a_batch_is_sent_in_messages_that_are_small_enough() -> None:
    training = echo_training()
    async with a_channel(training) as channel:
        peer = GrpcTrainingPeer(channel)
        result = await peer.forward_backward("m", 3, a_batch(*SIZES))
        assert result.metrics == {"loss:sum": 2.5}
        for size, logprobs in zip(SIZES, result.logprobs, strict=True):
            np.testing.assert_array_equal(logprobs, np.arange(size, dtype=np.float32) / 2)
        assert len(training.requests) > 1
        assert max(request.ByteSize() for request in training.requests) < MAX_MESSAGE_BYTES
        first = training.requests[0]
        assert (first.operation.model_id, first.operation.number) == ("m", 3)
        assert dict(first.loss_options) == {"beta": 0.05}
        assert not any(request.HasField("operation") for request in training.requests[1:])
        several = await peer.forward_backward("m", 3, a_batch(5, targets=4))
        assert several.logprobs[0].shape == (5, 4)


@pytest.mark.parametrize(("sizes", "targets"), [((5, 200_000, 1), 1), ((20_000, 3), 20)])
async def test_a_sequence_that_fits_into_no_message_is_sent_in_parts(
    sizes: tuple[int, ...], targets: int
) -> None:
    training = echo_training()
    async with a_channel(training) as channel:
        batch = a_batch(*sizes, targets=targets)
        result = await GrpcTrainingPeer(channel).forward_backward("m", 3, batch)
        for sequence, logprobs in zip(batch.sequences, result.logprobs, strict=True):
            np.testing.assert_array_equal(logprobs, (sequence.target_ids / 2).astype(np.float32))
        assert max(request.ByteSize() for request in training.requests) < MAX_MESSAGE_BYTES


async def test_other_calls_carry_what_the_contract_names() -> None:
    training = echo_training()
    async with a_channel(training) as channel:
        peer = GrpcTrainingPeer(channel)
        facts = await peer.describe_base()
        assert (facts.model, facts.max_rank, facts.models) == ("tiny", 8, {"m": 4})
        assert await peer.create_model("m", ModelSettings("tiny", 8, seed=5)) == 2
        assert training.requests[-1].seed == 5
        assert await peer.apply_update("m", 1, AdamSettings(beta2=0.5)) == {"grad_norm": 1.5}
        assert training.requests[-1].beta2 == 0.5


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.NOT_FOUND, "MODEL_UNKNOWN", Unknown),
        (grpc.StatusCode.FAILED_PRECONDITION, "OUT_OF_ORDER", OutOfOrder),
        (grpc.StatusCode.INVALID_ARGUMENT, "BAD_BATCH", OrderRefused),
        (grpc.StatusCode.ABORTED, "NOT_FINITE", OrderRefused),
        (grpc.StatusCode.UNAVAILABLE, "RANKS_LOST", Unavailable),
        (grpc.StatusCode.NOT_FOUND, "SOMETHING_NEW", Unavailable),
    ],
)
async def test_each_refusal_is_an_error_of_the_port(
    code: grpc.StatusCode, reason: str, expected: type[Exception]
) -> None:
    training = echo_training()
    training.refusal = ServiceError(code, reason, "because", domain="learner.flotilla")
    async with a_channel(training) as channel:
        with pytest.raises(expected, match="because"):
            await GrpcTrainingPeer(channel).apply_update("m", 1, AdamSettings())
