"""SamplingService: requests to samplers, checked and answered."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np

from flotilla.rollout.v1 import sampling_service_pb2 as pb
from flotilla.rollout.v1 import sampling_service_pb2_grpc as pb_grpc
from flotilla_common.rpc.rpc_options import MAX_MESSAGE_BYTES
from flotilla_rollout.ports import EngineDead, RequestAborted
from flotilla_rollout.sampling.refusals import bad_request, engine_dead, refuse
from flotilla_rollout.sampling.samplers import Samplers
from flotilla_rollout.sampling.types import (
    NamedWeights,
    PromptAnswer,
    SamplingOrder,
    SamplingOutcome,
)

_INT32, _FLOAT32 = "<i4", "<f4"
_MOST_NAME_CHARACTERS = 200


class SamplingService(pb_grpc.SamplingServiceServicer):
    """Adapter between the contract and the samplers."""

    def __init__(self, samplers: Samplers, model: str, max_num_seqs: int) -> None:
        self._samplers = samplers
        self._model = model
        self._max_num_seqs = max_num_seqs

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_SamplingServiceServicer_to_server(self, server)

    async def DescribeEngine(
        self, request: pb.DescribeEngineRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeEngineResponse:
        samplers = self._samplers
        return pb.DescribeEngineResponse(
            model=self._model,
            max_model_len=samplers.limits.max_model_len,
            vocabulary=samplers.limits.vocabulary,
            max_rank=samplers.room.max_rank,
            max_num_seqs=self._max_num_seqs,
            sampler_ids=samplers.ids,
            max_samplers=samplers.room.max_samplers,
        )

    async def OpenSampler(
        self, request: pb.OpenSamplerRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSamplerResponse:
        weights = _decode_weights(request.weights)
        with _refusing_failures():
            await self._samplers.open_sampler(_checked_id(request.sampler_id), weights)
        return pb.OpenSamplerResponse()

    async def ReplaceWeights(
        self, request: pb.ReplaceWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReplaceWeightsResponse:
        weights = _decode_weights(request.weights)
        with _refusing_failures():
            await self._samplers.replace_weights(request.sampler_id, weights)
        return pb.ReplaceWeightsResponse()

    async def CloseSampler(
        self, request: pb.CloseSamplerRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSamplerResponse:
        with _refusing_failures():
            await self._samplers.close_sampler(request.sampler_id)
        return pb.CloseSamplerResponse()

    async def Sample(
        self, request: pb.SampleRequest, context: grpc.aio.ServicerContext
    ) -> pb.SampleResponse:
        order = _decode_order(request)
        with _refusing_failures():
            outcome = await self._samplers.sample(request.sampler_id, order)
        return _encode_outcome(order, outcome)


@contextmanager
def _refusing_failures() -> Generator[None]:
    try:
        yield
    except EngineDead as error:
        raise engine_dead(error) from error
    except RequestAborted as error:
        raise refuse(grpc.StatusCode.UNAVAILABLE, "REQUEST_ABORTED", str(error)) from error


def _checked_id(sampler_id: str) -> str:
    if not sampler_id:
        raise bad_request("sampler_id: it is empty")
    return sampler_id


def _decode_weights(weights: pb.SamplerWeights) -> NamedWeights:
    if not 0 < len(weights.label) <= _MOST_NAME_CHARACTERS:
        raise bad_request(
            f"weights.label: {len(weights.label)} characters; 1 to {_MOST_NAME_CHARACTERS}"
        )
    match weights.WhichOneof("weights"):
        case "base":
            return NamedWeights(weights.label, "base")
        case "adapter_folder":
            return NamedWeights(weights.label, "adapter", _decode_folder(weights.adapter_folder))
        case "model_folder":
            return NamedWeights(weights.label, "model", _decode_folder(weights.model_folder))
        case _:
            raise bad_request("weights: neither base, adapter_folder nor model_folder")


def _decode_folder(path: str) -> Path:
    if not Path(path).is_absolute():
        raise bad_request(f"weights: {path!r} is no absolute path")
    return Path(path)


def _decode_order(request: pb.SampleRequest) -> SamplingOrder:
    if len(request.prompt_ids) % np.dtype(_INT32).itemsize:
        raise bad_request(f"prompt_ids: {len(request.prompt_ids)} bytes are no int32 values")
    return SamplingOrder(
        prompt_ids=np.frombuffer(request.prompt_ids, _INT32).astype(np.int32),
        num_samples=request.num_samples,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed if request.HasField("seed") else None,
        stop_strings=tuple(request.stop_strings),
        stop_ids=tuple(request.stop_ids),
        prompt_logprobs=request.prompt_logprobs,
        topk=request.topk_prompt_logprobs,
        first_answer=request.first_answer,
    )


def _encode_outcome(order: SamplingOrder, outcome: SamplingOutcome) -> pb.SampleResponse:
    response = pb.SampleResponse(
        answers=map(_encode_answer, outcome.answers), prompt_cache_hit_tokens=outcome.cached
    )
    if outcome.report is not None and order.prompt_logprobs:
        response.prompt_logprobs = outcome.report.logprobs.astype(_FLOAT32).tobytes()
    if outcome.report is not None and order.topk:
        response.topk_ids = outcome.report.topk_ids.astype(_INT32).tobytes()
        response.topk_logprobs = outcome.report.topk_logprobs.astype(_FLOAT32).tobytes()
    if (size := response.ByteSize()) > MAX_MESSAGE_BYTES:
        raise bad_request(
            f"num_samples: {order.num_samples} answers have {size} bytes, and a message holds"
            f" {MAX_MESSAGE_BYTES}: request them in parts (first_answer)"
        )
    return response


def _encode_answer(answer: PromptAnswer) -> pb.Answer:
    return pb.Answer(
        token_ids=answer.token_ids.astype(_INT32).tobytes(),
        logprobs=answer.logprobs.astype(_FLOAT32).tobytes(),
        stopped=answer.stopped,
        spans=[pb.WeightSpan(label=label, tokens=count) for label, count in answer.spans],
    )
