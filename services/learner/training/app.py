"""Composition of the service from its ranks and its exporter."""

from collections.abc import Callable

from flotilla.learner.v1 import training_service_pb2_grpc
from services.common.process.runtime import Runtime
from services.common.rpc import rpc
from services.learner.config.training import TrainingServiceConfig
from services.learner.training.batch_checks import SequenceLimits
from services.learner.training.folders import Export
from services.learner.training.serving_ranks import ServingRanks
from services.learner.training.trained_models import TrainedModels
from services.learner.training.training_service import TrainingService


async def serve_training(
    runtime: Runtime[TrainingServiceConfig],
    make_ranks: Callable[[str, bool], ServingRanks],
    export: Export,
) -> None:
    """Load the base, and serve until the service is drained. Raises RankError if it cannot be
    loaded."""
    config, policy = runtime.config.training, runtime.shared.policy
    models = TrainedModels(config, make_ranks)
    server = rpc.server(token=runtime.token)
    try:
        with runtime.loading():
            base = await models.start_base()
        service = TrainingService(
            models=models,
            base=base,
            model=policy.model,
            limits=SequenceLimits(policy.max_model_len, base.vocabulary),
            config=config,
            export=export,
        )
        training_service_pb2_grpc.add_TrainingServiceServicer_to_server(service, server)
        async with runtime.serving(server) as serving:
            serving.set_serving(True)
            await runtime.announce(serving.address)
            runtime.log.info("serving", address=serving.address)
            await runtime.drain.wait()
    finally:
        await models.close()
