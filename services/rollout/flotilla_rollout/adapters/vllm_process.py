"""The process of vLLM that computes: its start, from the options of a spec, and its end."""

import asyncio
import multiprocessing
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.process.tied_children import tie_children
from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.engine_machines import EngineMachines
from flotilla_rollout.adapters.vllm_arguments import parse_arguments, shorten_refusal
from flotilla_rollout.adapters.vllm_options import (
    MACHINES_EXECUTOR,
    ServedModel,
    engine_options,
    installed_versions,
    refuse_foreign_torchvision,
    set_environment,
)
from flotilla_rollout.config.rollout import EngineConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_NONE: Mapping[str, Any] = MappingProxyType({})


async def start_llm(
    config: EngineConfig,
    model: ServedModel,
    more: Mapping[str, Any] = _NONE,
    *,
    index: int = 0,
    machines: EngineMachines | None = None,
) -> "AsyncLLM":
    """Load the model into one engine, the `index`th of its replica, on the joined `machines` or on
    this one, with `more` arguments of vLLM.

    Takes seconds to minutes; raises vLLM's errors."""
    if config.device == "cpu":
        refuse_foreign_torchvision(installed_versions())
    set_environment(config, local=model.folder.exists())
    given = await asyncio.to_thread(parse_arguments, config.options)
    options = {**engine_options(config, model, index), **more, **given}
    try:
        llm = await asyncio.to_thread(_create_llm, options)
    except asyncio.CancelledError:
        # The thread waits for the engine's processes, which would outlive this one.
        for child in multiprocessing.active_children():
            child.kill()
        raise
    if machines is None:
        between = [child.pid for child in multiprocessing.active_children()]
        await llm.collective_rpc("end_with_rollout", args=(os.getpid(), between))
    else:
        await llm.collective_rpc("join_flotilla_machines")
    await llm.collective_rpc("correct_flotilla_logprobs")
    return llm


async def close_llm(llm: "AsyncLLM") -> None:
    """End the engine's process."""
    # Its reader runs in our loop, and must end with it.
    reader, llm.output_handler = llm.output_handler, None
    if reader is not None:
        await cancel_tasks([reader])
    await asyncio.to_thread(llm.shutdown)
    # The destructor would shut down again, after the interpreter's modules are gone.
    vars(llm)["shutdown"] = _do_nothing


def _do_nothing() -> None:
    """Replace a shutdown that has already happened."""


def _create_llm(options: dict[str, Any]) -> "AsyncLLM":
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if options.get("distributed_executor_backend") == MACHINES_EXECUTOR:
        from flotilla_rollout.adapters.vllm_executor import MachinesExecutor

        # vLLM checks the class itself for its abilities.
        options = {**options, "distributed_executor_backend": MachinesExecutor}
    try:
        # A loading core does not respond: `end_with_rollout` reaches it once it has loaded.
        arguments = AsyncEngineArgs(**options)
        if arguments.enable_chunked_prefill is False and arguments.enable_prefix_caching is None:
            # vLLM caches the states of recurrent layers only where it may split prompts.
            caches = not arguments.create_model_config().is_hybrid
            arguments.enable_prefix_caching = caches
        with tie_children():
            return AsyncLLM.from_engine_args(arguments)
    except ValueError as error:
        # Raised before any process is started, for options that conflict.
        raise ConfigError(f"rollout.engine: vLLM refuses it: {shorten_refusal(error)}") from error
