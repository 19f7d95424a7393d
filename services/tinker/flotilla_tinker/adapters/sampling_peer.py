"""The rollout's SamplingService."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import grpc.aio
import numpy as np

from flotilla.rollout.v1 import sampling_service_pb2 as pb
from flotilla.rollout.v1 import sampling_service_pb2_grpc as pb_grpc
from flotilla_common.aio.concurrency import running_tasks
from flotilla_tinker.adapters.peer_errors import peer_errors
from flotilla_tinker.types import (
    EngineFacts,
    SampledAnswer,
    SampleOrder,
    SampleResult,
    SamplerWeights,
)

if TYPE_CHECKING:
    from flotilla.rollout.v1.sampling_service_pb2_grpc import SamplingServiceAsyncStub

# A frozen or absent peer is noticed sooner, by the channel; these bound a peer that answers
# pings but not calls.
DESCRIBE_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 600.0
SAMPLE_TIMEOUT_S = 3600.0
# Tokens of all answers of a message, at 8 bytes each; and of an answer whose length is not given.
_ANSWER_TOKENS = 3 * 2**15
_UNKNOWN_TOKENS = 2**15
# Answers that the service takes in one call.
_MOST_ANSWERS = 1024
# Between the seeds of two calls; odd, so that no two are the same.
_SEED_STEP = 0x9E3779B97F4A7C15


class GrpcSamplingPeer:
    """SamplingPeer over a channel.

    No call waits for an absent peer: it is Unavailable at once, and its caller waits."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cast("SamplingServiceAsyncStub", pb_grpc.SamplingServiceStub(channel))

    async def describe_engine(self) -> EngineFacts:
        with peer_errors():
            answer = await self._stub.DescribeEngine(
                pb.DescribeEngineRequest(), timeout=DESCRIBE_TIMEOUT_S, wait_for_ready=False
            )
        return EngineFacts(
            model=answer.model,
            max_model_len=answer.max_model_len,
            vocabulary=answer.vocabulary,
            max_rank=answer.max_rank,
            max_num_seqs=answer.max_num_seqs,
            samplers=list(answer.sampler_ids),
            max_samplers=answer.max_samplers,
        )

    async def open_sampler(self, sampler_id: str, weights: SamplerWeights) -> None:
        request = pb.OpenSamplerRequest(sampler_id=sampler_id, weights=_weights_to_pb(weights))
        with peer_errors():
            await self._stub.OpenSampler(request, timeout=OPEN_TIMEOUT_S, wait_for_ready=False)

    async def replace_weights(self, sampler_id: str, weights: SamplerWeights) -> None:
        request = pb.ReplaceWeightsRequest(sampler_id=sampler_id, weights=_weights_to_pb(weights))
        with peer_errors():
            await self._stub.ReplaceWeights(request, timeout=OPEN_TIMEOUT_S, wait_for_ready=False)

    async def close_sampler(self, sampler_id: str) -> None:
        request = pb.CloseSamplerRequest(sampler_id=sampler_id)
        with peer_errors():
            await self._stub.CloseSampler(request, timeout=OPEN_TIMEOUT_S, wait_for_ready=False)

    async def sample(self, sampler_id: str, order: SampleOrder) -> SampleResult:
        """Sample in as many calls as the size of a message requires."""
        first, *rest = _parts_of(order)
        if not rest:
            return await self._sample(sampler_id, first)
        async with running_tasks(
            *(self._sample(sampler_id, part) for part in (first, *rest))
        ) as calls:
            results = await asyncio.gather(*calls)
        return replace(results[0], answers=[each for result in results for each in result.answers])

    async def _sample(self, sampler_id: str, order: SampleOrder) -> SampleResult:
        request = pb.SampleRequest(
            sampler_id=sampler_id,
            prompt_ids=order.prompt_ids.astype("<i4", copy=False).tobytes(),
            num_samples=order.num_samples,
            max_tokens=order.max_tokens,
            temperature=order.temperature,
            top_p=order.top_p,
            top_k=order.top_k,
            seed=order.seed,
            stop_strings=order.stop_strings,
            stop_ids=order.stop_ids,
            prompt_logprobs=order.prompt_logprobs,
            topk_prompt_logprobs=order.topk_prompt_logprobs,
        )
        with peer_errors():
            answer = await self._stub.Sample(
                request, timeout=SAMPLE_TIMEOUT_S, wait_for_ready=False
            )
        return _result_from_pb(answer, order.topk_prompt_logprobs)


def _parts_of(order: SampleOrder) -> list[SampleOrder]:
    """Return orders whose answers each fit a message; the first has the prompt's logprobs too."""
    fitting = _ANSWER_TOKENS // (order.max_tokens or _UNKNOWN_TOKENS)
    each = min(max(1, fitting), _MOST_ANSWERS)
    if order.num_samples <= each:
        return [order]
    parts = list[SampleOrder]()
    for start in range(0, order.num_samples, each):
        count = min(each, order.num_samples - start)
        seed = None if order.seed is None else (order.seed + start * _SEED_STEP) % 2**63
        parts.append(replace(order, num_samples=count, seed=seed))
    silent = (replace(part, prompt_logprobs=False, topk_prompt_logprobs=0) for part in parts[1:])
    return [parts[0], *silent]


def _weights_to_pb(weights: SamplerWeights) -> pb.SamplerWeights:
    if weights.folder is None:
        return pb.SamplerWeights(label=weights.label, base=True)
    if weights.whole:
        return pb.SamplerWeights(label=weights.label, model_folder=weights.folder)
    return pb.SamplerWeights(label=weights.label, adapter_folder=weights.folder)


def _result_from_pb(answer: pb.SampleResponse, topk: int) -> SampleResult:
    ids = np.frombuffer(answer.topk_ids, "<i4").reshape(-1, topk) if answer.topk_ids else None
    found = answer.topk_logprobs
    return SampleResult(
        answers=[_answer_from_pb(each) for each in answer.answers],
        prompt_logprobs=(
            np.frombuffer(answer.prompt_logprobs, "<f4") if answer.prompt_logprobs else None
        ),
        topk_ids=ids,
        topk_logprobs=np.frombuffer(found, "<f4").reshape(-1, topk) if found else None,
        cache_hit_tokens=answer.prompt_cache_hit_tokens,
    )


def _answer_from_pb(answer: pb.Answer) -> SampledAnswer:
    return SampledAnswer(
        token_ids=np.frombuffer(answer.token_ids, "<i4"),
        logprobs=np.frombuffer(answer.logprobs, "<f4"),
        stopped=answer.stopped,
        spans=[(span.label, span.tokens) for span in answer.spans],
    )
