"""The clients of TrainingService and SamplingService, against servers of the contracts."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from flotilla.learner.v1 import training_service_pb2 as training_pb
from flotilla.learner.v1 import training_service_pb2_grpc as training_grpc
from flotilla.rollout.v1 import sampling_service_pb2 as sampling_pb
from flotilla.rollout.v1 import sampling_service_pb2_grpc as sampling_grpc
from services.common.rpc import rpc
from services.common.rpc.errors import ServiceError
from services.common.rpc.rpc_options import MAX_MESSAGE_BYTES
from services.tinker.adapters.sampling_peer import GrpcSamplingPeer
from services.tinker.adapters.training_peer import GrpcTrainingPeer
from services.tinker.ports import OrderRefused, OutOfOrder, Unavailable, Unknown
from services.tinker.types import (
    AdamSettings,
    LossBatch,
    LossSequence,
    ModelSettings,
    SampleOrder,
    SamplerWeights,
)
from tests.support.fake_peers import TOKEN, served
from tests.support.free_ports import free_port

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
                yield training_pb.ForwardBackwardResponse(logprobs=[part])
        yield training_pb.ForwardBackwardResponse(metrics={"loss:sum": 2.5})

    async def ApplyUpdate(self, request: Any, context: Any) -> training_pb.ApplyUpdateResponse:
        self._note(request)
        return training_pb.ApplyUpdateResponse(metrics={"grad_norm": 1.5})


class EchoSampling(sampling_grpc.SamplingServiceServicer):
    def __init__(self) -> None:
        self.opened: list[sampling_pb.OpenSamplerRequest] = []
        self.sampled: list[sampling_pb.SampleRequest] = []
        self.refusal: ServiceError | None = None

    async def OpenSampler(self, request: Any, context: Any) -> sampling_pb.OpenSamplerResponse:
        self.opened.append(request)
        return sampling_pb.OpenSamplerResponse()

    async def Sample(
        self, request: sampling_pb.SampleRequest, context: Any
    ) -> sampling_pb.SampleResponse:
        self.sampled.append(request)
        if self.refusal:
            raise self.refusal
        answer = sampling_pb.Answer(
            token_ids=request.prompt_ids,
            logprobs=np.array([-1.0, -2.0], "<f4").tobytes(),
            stopped=True,
            spans=[sampling_pb.WeightSpan(label="a@1", tokens=2)],
        )
        topk = np.arange(2 * request.topk_prompt_logprobs, dtype="<i4")
        return sampling_pb.SampleResponse(
            answers=[answer] * request.num_samples,
            prompt_logprobs=np.array([np.nan, -1.0], "<f4").tobytes(),
            topk_ids=topk.tobytes(),
            topk_logprobs=topk.astype("<f4").tobytes(),
            prompt_cache_hit_tokens=1,
        )


def echo_training() -> EchoTraining:
    return EchoTraining()  # pyright: ignore[reportAbstractUsage]


add_training = partial(partial, training_grpc.add_TrainingServiceServicer_to_server)
add_sampling = partial(partial, sampling_grpc.add_SamplingServiceServicer_to_server)


@asynccontextmanager
async def a_channel(add: Callable[[grpc.aio.Server], None]) -> AsyncGenerator[grpc.aio.Channel]:
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
    async with a_channel(add_training(training)) as channel:
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
        with pytest.raises(OrderRefused, match=r"sequence 1 has .* bytes; one may have 1048576"):
            await peer.forward_backward("m", 3, a_batch(5, 70_000))


async def test_other_calls_carry_what_the_contract_names() -> None:
    training = echo_training()
    async with a_channel(add_training(training)) as channel:
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
    async with a_channel(add_training(training)) as channel:
        with pytest.raises(expected, match="because"):
            await GrpcTrainingPeer(channel).apply_update("m", 1, AdamSettings())


async def test_an_absent_peer_is_unavailable_without_a_wait() -> None:
    async with rpc.channel(f"127.0.0.1:{free_port()}", token=TOKEN) as channel:
        with pytest.raises(Unavailable):
            await GrpcSamplingPeer(channel).describe_engine()


async def test_samples_come_back_as_they_were_sent() -> None:
    sampling = EchoSampling()  # pyright: ignore[reportAbstractUsage]
    async with a_channel(add_sampling(sampling)) as channel:
        peer = GrpcSamplingPeer(channel)
        await peer.open_sampler("a", SamplerWeights("a@1", "/folder"))
        await peer.open_sampler("b", SamplerWeights("b@1", "/folder", whole=True))
        await peer.open_sampler("c", SamplerWeights("base"))
        kinds = [request.weights.WhichOneof("weights") for request in sampling.opened]
        assert kinds == ["adapter_folder", "model_folder", "base"]
        prompt = np.array([7, 8], np.int32)
        result = await peer.sample("a", SampleOrder(prompt, 2, topk_prompt_logprobs=3))
        assert len(result.answers) == 2
        assert result.answers[0].token_ids.tolist() == [7, 8]
        assert result.answers[0].spans == [("a@1", 2)]
        assert result.topk_ids is not None
        assert result.topk_ids.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert result.cache_hit_tokens == 1
        code = grpc.StatusCode.NOT_FOUND
        sampling.refusal = ServiceError(code, "SAMPLER_UNKNOWN", "gone", domain="rollout.flotilla")
        with pytest.raises(Unknown, match="gone"):
            await peer.sample("a", SampleOrder(prompt, 1))


async def test_answers_that_fit_no_message_are_sampled_in_several_calls() -> None:
    sampling = EchoSampling()  # pyright: ignore[reportAbstractUsage]
    async with a_channel(add_sampling(sampling)) as channel:
        order = SampleOrder(np.array([7, 8], np.int32), 25, 8192, seed=5, prompt_logprobs=True)
        result = await GrpcSamplingPeer(channel).sample("a", order)
        assert len(result.answers) == 25
        assert result.prompt_logprobs is not None
        assert sorted(request.num_samples for request in sampling.sampled) == [1, 12, 12]
        assert len({request.seed for request in sampling.sampled}) == 3
        assert [request.prompt_logprobs for request in sampling.sampled].count(True) == 1
