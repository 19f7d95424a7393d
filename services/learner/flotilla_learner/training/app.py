"""Composition of the service from its ranks and its exporter."""

from collections.abc import Callable

from flotilla_common.process.runtime import Runtime
from flotilla_learner.config.training import TrainingServiceConfig
from flotilla_learner.training.batch_checks import SequenceLimits
from flotilla_learner.training.folders import Export
from flotilla_learner.training.serving_ranks import ServingRanks
from flotilla_learner.training.trained_models import TrainedModels
from flotilla_learner.training.training_service import TrainingService, build_server


async def serve_training(
    runtime: Runtime[TrainingServiceConfig],
    make_ranks: Callable[[str, bool], ServingRanks],
    export: Export,
) -> None:
    """Load the base, and serve until the service is drained. Raises RankError if it cannot be
    loaded."""
    config, policy = runtime.config.training, runtime.shared.policy
    models = TrainedModels(config, make_ranks)
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
        async with runtime.serving(build_server(runtime.token, service)) as serving:
            serving.set_serving(True)
            await runtime.announce(serving.address)
            runtime.log.info("serving", address=serving.address)
            await runtime.drain.wait()
    finally:
        await models.close()
