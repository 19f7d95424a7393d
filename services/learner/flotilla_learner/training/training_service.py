"""Server of `flotilla.learner.v1.TrainingService`. The proto holds the contract."""

from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from flotilla.learner.v1 import training_service_pb2 as pb
from flotilla.learner.v1 import training_service_pb2_grpc
from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.stalled_streams import RefusedStreamDrain
from flotilla_learner.config.training import TrainingConfig
from flotilla_learner.training.batch_checks import (
    LOSSES,
    SequenceLimits,
    check_update,
)
from flotilla_learner.training.folders import Export, write_export, write_state
from flotilla_learner.training.messages import encode_scores, read_batch
from flotilla_learner.training.refusals import OperationRefused
from flotilla_learner.training.trained_models import TrainedModel, TrainedModels
from flotilla_learner.training_types import (
    AdamUpdate,
    AdapterChoice,
    BaseModel,
    TargetScores,
    WrittenFolder,
)

DOMAIN = "learner.flotilla"
Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
_CODES = {
    "MODEL_UNKNOWN": grpc.StatusCode.NOT_FOUND,
    "NO_STATE": grpc.StatusCode.NOT_FOUND,
    "MODEL_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "OUT_OF_ORDER": grpc.StatusCode.FAILED_PRECONDITION,
    "FOLDER_UNUSABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "TOO_MANY_MODELS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NOT_FINITE": grpc.StatusCode.ABORTED,
    "RANKS_LOST": grpc.StatusCode.UNAVAILABLE,
}
# The others: BAD_SETTINGS, BAD_BATCH, UNKNOWN_LOSS, STATE_MISMATCH.
_USUAL = grpc.StatusCode.INVALID_ARGUMENT


@dataclass(kw_only=True)
class TrainingService(training_service_pb2_grpc.TrainingServiceServicer):
    """Adapter between the contract and the models.

    `model` is the base as the spec names it; `export` writes what samplers load."""

    models: TrainedModels
    base: BaseModel
    model: str
    limits: SequenceLimits
    config: TrainingConfig
    export: Export

    def __post_init__(self) -> None:
        self._work = BackgroundTasks()
        self._last_words = RefusedStreamDrain()

    async def DescribeBase(
        self, request: pb.DescribeBaseRequest, context: Context
    ) -> pb.DescribeBaseResponse:
        return pb.DescribeBaseResponse(
            model=self.model,
            max_model_len=self.limits.max_model_len,
            vocabulary=self.limits.vocabulary,
            max_rank=self.config.max_rank,
            losses=list(LOSSES),
            models=self.models.operations,
            max_models=self.config.max_models,
            parameters=self.base.parameters,
        )

    async def CreateModel(
        self, request: pb.CreateModelRequest, context: Context
    ) -> pb.CreateModelResponse:
        choice = AdapterChoice(
            request.lora_rank, request.seed, request.train_attention, request.train_mlp
        )
        model = await self._finish(self.models.create_model(request.model_id, choice))
        return pb.CreateModelResponse(
            trainable_parameters=model.parameters, operation=model.operation
        )

    async def DeleteModel(
        self, request: pb.DeleteModelRequest, context: Context
    ) -> pb.DeleteModelResponse:
        await self._finish(self.models.delete_model(request.model_id))
        return pb.DeleteModelResponse()

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[pb.ForwardBackwardRequest], context: Context
    ) -> AsyncIterator[pb.ForwardBackwardResponse]:
        try:
            operation, batch = await read_batch(request_iterator, self.limits)
        except OperationRefused as refused:
            await self._last_words.drain_stream(request_iterator)
            raise _as_error(refused) from refused

        async def run(model: TrainedModel) -> TargetScores:
            return await model.ranks.accumulate(model.name, batch)

        if batch.forward_only:
            work = self.models.read_out(operation.model_id, run)
        else:
            kind = "ForwardBackward"
            work = self.models.carry_out(operation.model_id, operation.number, kind, run)
        scores = await self._finish(work)
        for response in encode_scores(scores):
            yield response

    async def ApplyUpdate(
        self, request: pb.ApplyUpdateRequest, context: Context
    ) -> pb.ApplyUpdateResponse:
        update = AdamUpdate(
            request.learning_rate,
            request.beta1,
            request.beta2,
            request.eps,
            request.weight_decay,
            request.grad_clip_norm,
        )

        async def run(model: TrainedModel) -> Mapping[str, float]:
            check_update(update)
            return {"grad_norm": await model.ranks.update(model.name, update)}

        return pb.ApplyUpdateResponse(
            metrics=await self._carry_out(request.operation, "ApplyUpdate", run)
        )

    async def SaveState(
        self, request: pb.SaveStateRequest, context: Context
    ) -> pb.SaveStateResponse:
        written = await self._write(request, "state")
        return pb.SaveStateResponse(total_bytes=written.total_bytes)

    async def LoadState(
        self, request: pb.LoadStateRequest, context: Context
    ) -> pb.LoadStateResponse:
        folder, with_optimizer = Path(request.folder), request.with_optimizer

        async def run(model: TrainedModel) -> None:
            await model.ranks.load(model.name, folder, with_optimizer=with_optimizer)

        await self._carry_out(request.operation, "LoadState", run)
        return pb.LoadStateResponse()

    async def ExportWeights(
        self, request: pb.ExportWeightsRequest, context: Context
    ) -> pb.ExportWeightsResponse:
        written = await self._write(request, "export")
        return pb.ExportWeightsResponse(
            total_bytes=written.total_bytes, fingerprint=written.fingerprint
        )

    async def _carry_out(self, operation: pb.Operation, kind: str, run: Any) -> Any:
        work = self.models.carry_out(operation.model_id, operation.number, kind, run)
        return await self._finish(work)

    async def _write(
        self, request: pb.SaveStateRequest | pb.ExportWeightsRequest, kind: str
    ) -> WrittenFolder:
        """Write a folder once, however often that is requested after one operation."""
        folder, operation = request.folder, request.operation

        async def run(model: TrainedModel) -> WrittenFolder:
            key = (kind, Path(folder))
            if key not in model.written:
                write = write_state if kind == "state" else self._export
                model.written[key] = await write(model, folder)
            return model.written[key]

        work = self.models.read_out(operation.model_id, run, operation.number)
        return await self._finish(work)

    async def _export(self, model: TrainedModel, folder: str) -> WrittenFolder:
        return await write_export(model, folder, self.export)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish work that changes models, even if the caller goes away."""
        try:
            return await self._work.run_shielded(work)
        except OperationRefused as refused:
            raise _as_error(refused) from refused


def build_server(token: str, service: TrainingService) -> grpc.aio.Server:
    """Build the server, not started yet."""
    server = rpc.server(token=token)
    training_service_pb2_grpc.add_TrainingServiceServicer_to_server(service, server)
    return server


def _as_error(refused: OperationRefused) -> ServiceError:
    code = _CODES.get(refused.reason, _USUAL)
    return ServiceError(code, refused.reason, str(refused), domain=DOMAIN)
