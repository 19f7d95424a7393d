"""The entry of the sampling service: `python -m flotilla_rollout.sampling --config SPEC`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_rollout.config.sampling import SamplingProcessConfig

if TYPE_CHECKING:
    from flotilla_rollout.sampling.adapters.vllm_samplers import VllmSamplers

DOC = """Samples from vLLM at callers' requests, with weights that they name: the base, LoRA
adapters next to it, or whole models in turn.

It needs no other service; a spec with `name`, `policy` and `rollout.engine` is enough:

    FLOTILLA_TOKEN=... python -m flotilla_rollout.sampling --config spec.toml \\
        --listen 127.0.0.1:7003
"""


def load() -> Callable[[Runtime[SamplingProcessConfig]], Awaitable[None]]:
    return serve_samplers


async def serve_samplers(runtime: Runtime[SamplingProcessConfig]) -> None:
    """Serve until drained; raise the error of an engine that has ended."""
    from flotilla_common.aio.concurrency import run_until_first
    from flotilla_common.rpc import rpc
    from flotilla_rollout.sampling.api.sampling_service import SamplingService
    from flotilla_rollout.sampling.samplers import SamplerRoom, Samplers
    from flotilla_rollout.sampling.weight_folders import find_model_files, read_shapes

    config, shared = runtime.config, runtime.shared
    async with AsyncExitStack() as stack:
        with runtime.loading():
            folder, engine = await _start_engine(runtime)
        stack.push_async_callback(engine.close)
        shapes = await asyncio.to_thread(lambda: read_shapes(find_model_files(folder)))
        limits = config.sampling
        room = SamplerRoom(limits.max_samplers, limits.max_rank, limits.max_active, folder, shapes)
        samplers = Samplers(engine, room, engine.limits)
        server = rpc.server(token=runtime.token)
        SamplingService(samplers, shared.policy.model, config.engine.max_num_seqs).add_to(server)
        serving = await stack.enter_async_context(runtime.serving(server))
        freeze_loaded_objects()
        runtime.report_status(lambda: ReplicaStatus("sampling", True))
        await runtime.announce(serving.address)
        serving.set_serving(True)
        runtime.log.info("serving", address=serving.address, worker=runtime.worker_id)
        await run_until_first(runtime.drain.wait(), _watch_engine(engine, runtime.drain))


async def _start_engine(
    runtime: Runtime[SamplingProcessConfig],
) -> "tuple[Path, VllmSamplers]":
    from flotilla_common.adapters.model_hub import stage_model
    from flotilla_rollout.adapters.stop_tokens import read_eos_ids
    from flotilla_rollout.adapters.vllm_options import ServedModel
    from flotilla_rollout.sampling.adapters.vllm_samplers import VllmSamplers

    config, policy = runtime.config, runtime.shared.policy
    folder = await asyncio.to_thread(stage_model, policy.model, policy.revision)
    # vLLM itself ends by the tokenizer's.
    model = ServedModel(folder, policy, read_eos_ids(folder))
    return folder, await VllmSamplers.start_engine(config.engine, config.sampling, model)


async def _watch_engine(engine: "VllmSamplers", drain: asyncio.Event) -> None:
    from flotilla_rollout.ports import EngineDead
    from flotilla_rollout.sampling.refusals import engine_dead

    reason = await engine.wait_until_dead()
    # A Ctrl-C reaches the engine's own process too: no failure when draining anyway.
    if not drain.is_set():
        raise engine_dead(EngineDead(reason))


if __name__ == "__main__":
    run_service_process("rollout", SamplingProcessConfig, load, doc=DOC)
