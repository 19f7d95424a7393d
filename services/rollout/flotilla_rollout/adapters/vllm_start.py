"""The start of a replica's engines."""

import asyncio

from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.adapters.engine_group import EngineGroup
from flotilla_rollout.adapters.engine_machines import EngineMachines
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import Engine

log = get_logger(__name__)


async def start_engines(
    config: EngineConfig, model: ServedModel, machines: EngineMachines | None = None
) -> Engine:
    """Load the model, once for each engine of the replica; raises vLLM's errors.

    An engine that spans `machines` raises EngineDead if one of them is lost meanwhile."""
    if config.pipeline_parallel > 1:
        log.warning("pipeline parallel is passed on to vLLM: Flotilla has not been tested with it")
    if machines is not None:
        starting = VllmEngine.start_engine(config, model, machines=machines)
        return await machines.start_beside(starting)
    if config.data_parallel == 1:
        return await VllmEngine.start_engine(config, model)
    engines: list[VllmEngine] = []
    try:
        # One after another, because vLLM's process settings are global to this process.
        for index in range(config.data_parallel):
            engines.append(await VllmEngine.start_engine(config, model, index))
    except BaseException:
        await asyncio.gather(*(engine.close() for engine in engines))
        raise
    return EngineGroup(engines, max_num_seqs=config.max_num_seqs, dtype=model.policy.dtype)
