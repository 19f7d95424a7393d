"""A process that is the trainer and the engine of a desk, to be killed:
`python -m tests.tinker.work.killed_peers ADDRESS`. It serves both contracts there."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
import numpy as np

from flotilla.learner.v1 import training_service_pb2 as train_pb
from flotilla.learner.v1 import training_service_pb2_grpc as train_grpc
from flotilla.rollout.v1 import sampling_service_pb2 as sample_pb
from flotilla.rollout.v1 import sampling_service_pb2_grpc as sample_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_tinker.ports import OrderRefused, OutOfOrder, Unknown
from flotilla_tinker.types import (
    AdamSettings,
    LossBatch,
    LossSequence,
    ModelSettings,
    SampleOrder,
    SamplerWeights,
)
from tests.support.fake_peers import TOKEN
from tests.tinker.work.desk_doubles import BASE, ScriptedEngine, ScriptedTrainer

T = TypeVar("T")
_CODE = grpc.StatusCode


async def refuse(call: Awaitable[T], unknown: str, domain: str) -> T:
    """Return what a scripted peer answers, or refuse as the contract says."""
    try:
        return await call
    except OrderRefused as error:
        reason = "BAD_BATCH" if unknown == "MODEL_UNKNOWN" else "BAD_REQUEST"
        raise ServiceError(_CODE.INVALID_ARGUMENT, reason, str(error), domain=domain) from error
    except Unknown as error:
        raise ServiceError(_CODE.NOT_FOUND, unknown, str(error), domain=domain) from error
    except OutOfOrder as error:
        raise ServiceError(
            _CODE.FAILED_PRECONDITION, "OUT_OF_ORDER", str(error), domain=domain
        ) from error


async def as_trainer(call: Awaitable[T]) -> T:
    return await refuse(call, "MODEL_UNKNOWN", "learner.flotilla")


async def as_engine(call: Awaitable[T]) -> T:
    return await refuse(call, "SAMPLER_UNKNOWN", "rollout.flotilla")


class ScriptedTraining(train_grpc.TrainingServiceServicer):
    """TrainingService of a scripted trainer."""

    def __init__(self) -> None:
        self._peer = ScriptedTrainer(pause_s=0.002)

    async def DescribeBase(self, request: Any, context: Any) -> train_pb.DescribeBaseResponse:
        facts = await self._peer.describe_base()
        return train_pb.DescribeBaseResponse(
            model=BASE,
            models=facts.models,
            max_rank=facts.max_rank,
            max_models=facts.max_models,
        )

    async def CreateModel(self, request: Any, context: Any) -> train_pb.CreateModelResponse:
        settings = ModelSettings(BASE, request.lora_rank, request.seed)
        number = await as_trainer(self._peer.create_model(request.model_id, settings))
        return train_pb.CreateModelResponse(operation=number)

    async def DeleteModel(self, request: Any, context: Any) -> train_pb.DeleteModelResponse:
        await as_trainer(self._peer.delete_model(request.model_id))
        return train_pb.DeleteModelResponse()

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[train_pb.ForwardBackwardRequest], context: Any
    ) -> AsyncIterator[train_pb.ForwardBackwardResponse]:
        requests = [request async for request in request_iterator]
        first = requests[0]
        ids = np.frombuffer(first.sequences[0].token_ids, "<i4")
        sequence = LossSequence(ids, ids.astype(np.int64), {})
        batch = LossBatch(first.loss, {}, [sequence], forward_only=first.forward_only)
        asked = (first.operation.model_id, first.operation.number, batch)
        result = await as_trainer(self._peer.forward_backward(*asked))
        # Of the sequence's length, as the contract wants it.
        logprobs = np.resize(result.logprobs[0], len(ids)).astype("<f4")
        yield train_pb.ForwardBackwardResponse(
            logprobs=[logprobs.tobytes()], metrics=result.metrics
        )

    async def ApplyUpdate(self, request: Any, context: Any) -> train_pb.ApplyUpdateResponse:
        asked = (request.operation.model_id, request.operation.number)
        settings = AdamSettings(request.learning_rate)
        return train_pb.ApplyUpdateResponse(
            metrics=await as_trainer(self._peer.apply_update(*asked, settings))
        )

    async def SaveState(self, request: Any, context: Any) -> train_pb.SaveStateResponse:
        asked = (request.operation.model_id, request.operation.number, request.folder)
        size = await as_trainer(self._peer.save_state(*asked))
        return train_pb.SaveStateResponse(total_bytes=size)

    async def LoadState(self, request: Any, context: Any) -> train_pb.LoadStateResponse:
        asked = (request.operation.model_id, request.operation.number, request.folder)
        load = self._peer.load_state(*asked, with_optimizer=request.with_optimizer)
        await as_trainer(load)
        return train_pb.LoadStateResponse()

    async def ExportWeights(self, request: Any, context: Any) -> train_pb.ExportWeightsResponse:
        asked = (request.operation.model_id, request.operation.number, request.folder)
        size = await as_trainer(self._peer.export_weights(*asked))
        return train_pb.ExportWeightsResponse(total_bytes=size)


class ScriptedSampling(sample_grpc.SamplingServiceServicer):
    """SamplingService of a scripted engine."""

    def __init__(self) -> None:
        self._peer = ScriptedEngine(max_num_seqs=8, pause_s=0.005)

    async def DescribeEngine(self, request: Any, context: Any) -> sample_pb.DescribeEngineResponse:
        facts = await self._peer.describe_engine()
        limits = {"max_num_seqs": facts.max_num_seqs, "max_samplers": facts.max_samplers}
        return sample_pb.DescribeEngineResponse(
            model=BASE, max_rank=facts.max_rank, sampler_ids=facts.samplers, **limits
        )

    async def OpenSampler(self, request: Any, context: Any) -> sample_pb.OpenSamplerResponse:
        await as_engine(self._peer.open_sampler(request.sampler_id, _weights_of(request)))
        return sample_pb.OpenSamplerResponse()

    async def ReplaceWeights(self, request: Any, context: Any) -> sample_pb.ReplaceWeightsResponse:
        await as_engine(self._peer.replace_weights(request.sampler_id, _weights_of(request)))
        return sample_pb.ReplaceWeightsResponse()

    async def CloseSampler(self, request: Any, context: Any) -> sample_pb.CloseSamplerResponse:
        await as_engine(self._peer.close_sampler(request.sampler_id))
        return sample_pb.CloseSamplerResponse()

    async def Sample(self, request: Any, context: Any) -> sample_pb.SampleResponse:
        order = SampleOrder(np.frombuffer(request.prompt_ids, "<i4"), request.num_samples)
        result = await as_engine(self._peer.sample(request.sampler_id, order))
        answers = [
            sample_pb.Answer(
                token_ids=answer.token_ids.tobytes(),
                logprobs=answer.logprobs.tobytes(),
                stopped=answer.stopped,
                spans=[sample_pb.WeightSpan(label=key, tokens=size) for key, size in answer.spans],
            )
            for answer in result.answers
        ]
        return sample_pb.SampleResponse(answers=answers)


def _weights_of(request: Any) -> SamplerWeights:
    weights = request.weights
    return SamplerWeights(weights.label, weights.adapter_folder or weights.model_folder or None)


async def main() -> None:
    server = rpc.server(token=TOKEN)
    train_grpc.add_TrainingServiceServicer_to_server(ScriptedTraining(), server)
    sample_grpc.add_SamplingServiceServicer_to_server(ScriptedSampling(), server)
    async with rpc.serving(server, sys.argv[1]) as serving:
        print(serving.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
