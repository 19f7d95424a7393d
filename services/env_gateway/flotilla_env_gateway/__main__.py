"""Start the environment gateway: `python -m flotilla_env_gateway --config SPEC`."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from flotilla_common.aio.concurrency import running_tasks, wait_unless
from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.wire.registry import load_registry
from flotilla_env_gateway.api.alarms import GatewayAlarms
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.ports import Backend, Recorder

if TYPE_CHECKING:
    from flotilla_env_gateway.episodes.gateway import Gateway

_DOC = """Opens environments for rollout workers, calls their tools, grades and closes them.

Concurrency limits, retries and verifiers live here only. To run it alone:

    FLOTILLA_TOKEN=... python -m flotilla_env_gateway --config deploy/runs/local.toml
"""


def load() -> Callable[[Runtime[EnvGatewayConfig]], Awaitable[None]]:
    return serve_gateway


async def serve_gateway(runtime: Runtime[EnvGatewayConfig]) -> None:
    """Serve until drained, then close every environment."""
    from flotilla.env_gateway.v1 import episode_service_pb2_grpc
    from flotilla_common.rpc import rpc
    from flotilla_env_gateway.api.episode_service import EpisodeService, most_streams

    runtime.watchdog.limit_s = runtime.config.stall_s
    async with AsyncExitStack() as stack:
        gateway = await _build_gateway(runtime, stack)
        streams = most_streams(runtime.config.limits)
        server = rpc.server(token=runtime.token, most_streams=streams)
        service = EpisodeService(gateway, runtime.drain.set)
        episode_service_pb2_grpc.add_EpisodeServiceServicer_to_server(service, server)
        serving = await stack.enter_async_context(runtime.serving(server))
        alarms = GatewayAlarms()
        background = _run_background_loops(gateway, alarms, runtime.hurry_heartbeat)
        async with running_tasks(background) as (keeping,):
            freeze_loaded_objects()
            serving.set_serving(True)
            runtime.report_status(lambda: _current_status(runtime, alarms))
            await runtime.announce(serving.address)
            runtime.log.info(
                "serving", address=serving.address, backends=sorted(runtime.config.backend_names)
            )
            if await wait_unless(runtime.drain, keeping):
                keeping.result()
        serving.set_serving(False)
        await gateway.drain(runtime.config.drain_s)


def _current_status(runtime: Runtime[EnvGatewayConfig], alarms: GatewayAlarms) -> ReplicaStatus:
    draining = runtime.drain.is_set()
    phase = "draining" if draining else "serving"
    return ReplicaStatus(phase, serving=not draining, alarms=alarms.raised)


async def _build_gateway(runtime: Runtime[EnvGatewayConfig], stack: AsyncExitStack) -> "Gateway":
    """Build the gateway with everything it needs; `stack` closes those parts at the end."""
    from flotilla_env_gateway.adapters.image_scaling import scale_image
    from flotilla_env_gateway.episodes.gateway import Gateway
    from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
    from flotilla_env_gateway.grading.grader import VerifierRunner
    from flotilla_env_gateway.grading.trusted_verifiers import load_digests
    from flotilla_env_gateway.grading.verifier_files import load_verifiers
    from flotilla_env_gateway.grading.verifier_functions import load_functions
    from flotilla_env_gateway.verify.verifier_pool import VerifierPool
    from flotilla_env_gateway.verify.verifier_process import StartError

    config = runtime.config.fill_coordinates(_find_units(Path(runtime.shared.policy.model)))
    verifiers = config.verifiers
    # First: what it finds missing is an error before anything starts.
    backends = await stack.enter_async_context(_open_backends(config))
    functions = await load_functions(config)
    pool = VerifierPool(
        size=verifiers.workers,
        memory_bytes=verifiers.memory_bytes,
        cpu_s=verifiers.timeout_s,
        unsafe=verifiers.unsafe_local_verifiers,
        modules=[each.module for each in functions.values() if each.module],
        weight_of=config.weight_of,
    )
    stack.push_async_callback(pool.close)
    try:
        await pool.start_workers()
    except StartError as error:
        raise ConfigError(f"a process for verifiers does not start: {error}") from error
    journal = InstanceJournal(runtime.run_dir / f"{runtime.worker_id}.sqlite")
    stack.callback(journal.close)
    recorder: Recorder | None = None
    if config.record:
        from flotilla_env_gateway.adapters.replay.recorder import Recording

        recorder = Recording(runtime.run_dir, max_bytes=config.limits.record_bytes)
        stack.push_async_callback(recorder.close)
    digests = load_digests(verifiers.digests)
    return Gateway(
        config,
        backends,
        VerifierRunner(verifiers, pool, digests, load_verifiers(config), functions),
        journal,
        incarnation=f"{runtime.run_id}.{runtime.worker_id}.{runtime.incarnation[:8]}",
        watchdog=runtime.watchdog,
        scale=scale_image,
        sandbox_limits=pool.sandbox_limits,
        recorder=recorder,
    )


def _find_units(model: Path) -> Literal["pixels", "relative1000"] | None:
    """Return how the policy's model points: by its own config.json if it is a folder here, which
    names the type that a folder's name may not, else by its name."""
    from flotilla_common.files.json_files import read_json_object
    from flotilla_env_gateway.tools.action_vocabularies import find_family_units

    try:
        kind = read_json_object(model / "config.json").get("model_type")
    except (OSError, ValueError):
        kind = None
    return find_family_units(str(kind or model))


async def _run_background_loops(
    gateway: "Gateway", alarms: GatewayAlarms, hurry: Callable[[], None]
) -> None:
    """Run the gateway's background loops: lease expiry, event-loop lag, metrics and alarms.
    Never returns."""
    from flotilla_env_gateway.api import status

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(gateway.run_lease_loop())
        tasks.create_task(status.measure_loop_lag())
        tasks.create_task(status.export_metrics_forever(gateway))
        tasks.create_task(status.update_alarms_forever(gateway, alarms, hurry))


@asynccontextmanager
async def _open_backends(config: EnvGatewayConfig) -> AsyncGenerator[Mapping[str, Backend]]:
    """Open the backends that the configuration uses, and close them at the end."""
    from flotilla_env_gateway.adapters.backend_factory import build_backend

    backends: dict[str, Backend] = {}
    try:
        for name in sorted(config.backend_names):
            backends[name] = build_backend(name, config)
        yield backends
    finally:
        for backend in backends.values():
            await backend.close()


def check_functions(_: SharedConfig, config: EnvGatewayConfig) -> str:
    """Load verifiers that are functions, before anything starts. Raises ConfigError."""
    from flotilla_env_gateway.grading.verifier_functions import load_functions

    asyncio.run(load_functions(config))
    return ""


def main() -> NoReturn:
    """Run a gateway from its command line, and exit the process."""
    run_service_process(
        *("env_gateway", EnvGatewayConfig, load),
        doc=_DOC,
        registry=load_registry,
        check=check_functions,
    )


if __name__ == "__main__":
    main()
