"""The client of SamplingService, against a server of the contract."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from flotilla.rollout.v1 import sampling_service_pb2 as sampling_pb
from flotilla.rollout.v1 import sampling_service_pb2_grpc as sampling_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.free_ports import free_port
from flotilla_rollout.sampling.order_checks import MOST_ANSWERS
from flotilla_tinker.adapters.sampling_peer import GrpcSamplingPeer
from flotilla_tinker.ports import Unavailable, Unknown
from flotilla_tinker.types import (
    SampleOrder,
    SamplerWeights,
)
from tests.support.fake_peers import TOKEN, served

SIZES = (7, 40_000, 3, 30_000, 1)


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


@asynccontextmanager
async def a_channel(sampling: EchoSampling) -> AsyncGenerator[grpc.aio.Channel]:
    """A channel to a server of the contract."""
    add = partial(sampling_grpc.add_SamplingServiceServicer_to_server, sampling)
    async with served(add) as address, rpc.channel(address, token=TOKEN) as channel:
        yield channel


async def test_an_absent_peer_is_unavailable_without_a_wait() -> None:
    async with rpc.channel(f"127.0.0.1:{free_port()}", token=TOKEN) as channel:
        with pytest.raises(Unavailable):
            await GrpcSamplingPeer(channel).describe_engine()


async def test_samples_come_back_as_they_were_sent() -> None:
    sampling = EchoSampling()  # pyright: ignore[reportAbstractUsage]
    async with a_channel(sampling) as channel:
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
    async with a_channel(sampling) as channel:
        order = SampleOrder(np.array([7, 8], np.int32), 25, 8192, seed=5, prompt_logprobs=True)
        result = await GrpcSamplingPeer(channel).sample("a", order)
        assert len(result.answers) == 25
        assert result.prompt_logprobs is not None
        assert sorted(request.num_samples for request in sampling.sampled) == [1, 12, 12]
        assert len({request.seed for request in sampling.sampled}) == 3
        assert [request.prompt_logprobs for request in sampling.sampled].count(True) == 1


async def test_more_answers_than_the_service_takes_are_sampled_in_several_calls() -> None:
    sampling = EchoSampling()  # pyright: ignore[reportAbstractUsage]
    async with a_channel(sampling) as channel:
        order = SampleOrder(np.array([7], np.int32), 2 * MOST_ANSWERS + 1, 4)
        result = await GrpcSamplingPeer(channel).sample("a", order)
        assert len(result.answers) == order.num_samples
        assert max(request.num_samples for request in sampling.sampled) == MOST_ANSWERS
