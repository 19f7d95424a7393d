"""The entry of a rollout worker: `python -m flotilla_rollout --config SPEC`."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import split_host_port
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.weights.shared_memory import private_folder, shared_name
from flotilla_common.wire.registry import load_registry
from flotilla_rollout.config.rollout import RolloutConfig

if TYPE_CHECKING:
    from flotilla_common.rpc.rpc import Serving
    from flotilla_rollout.adapters.engine_machines import EngineMachines
    from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
    from flotilla_rollout.adapters.learner import GroupClient
    from flotilla_rollout.adapters.learner_calls import WorkerIdentity
    from flotilla_rollout.adapters.model_files import ModelFiles
    from flotilla_rollout.api.rollout_service import RolloutService
    from flotilla_rollout.episodes.episode import AttemptRunner
    from flotilla_rollout.ports import Engine
    from flotilla_rollout.work.burn_in import BurnIn
    from flotilla_rollout.work.service_use import ServiceUse
    from flotilla_rollout.work.weight_updater import WeightUpdater
    from flotilla_rollout.work.worker import Worker

DOC = """Samples trajectories with vLLM, or at a Tinker service: leases groups of attempts from the
learner, plays them in environments of the env_gateway, submits them, and loads new weights
meanwhile.

It needs no inbound port; its own service is for inspection. To run it alone:

    FLOTILLA_TOKEN=... python -m flotilla_rollout --config deploy/runs/local.toml \\
        --peer learner=127.0.0.1:7001 --peer env_gateway=127.0.0.1:7002
"""
STATUS_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _WorkerParts:
    """Parts that run side by side in a worker process."""

    environment: "GatewayEnvironment"
    follower: "WeightUpdater"
    burn_in: "BurnIn"
    worker: "Worker"
    service: "RolloutService"


def load() -> Callable[[Runtime[RolloutConfig]], Awaitable[None]]:
    return serve_rollout


async def serve_rollout(runtime: Runtime[RolloutConfig]) -> None:
    """Work until drained; raise an error that makes further work pointless."""
    from flotilla.rollout.v1 import rollout_service_pb2_grpc
    from flotilla_common.aio.concurrency import run_unless, run_until_first
    from flotilla_common.rpc import rpc

    use = prepare_service_use(runtime.shared, runtime.config)
    from flotilla_rollout.adapters.model_files import read_model_files
    from flotilla_rollout.ports import EngineDead

    runtime.watchdog.limit_s = runtime.config.stall_s
    async with AsyncExitStack() as stack:
        name = f"{shared_name(runtime.run_id, runtime.run_dir)}-{runtime.worker_id}"
        memory = stack.enter_context(private_folder(name))
        with runtime.loading():
            model = await asyncio.to_thread(read_model_files, runtime.shared, runtime.config)
            machines = await stack.enter_async_context(_joined_machines(runtime, model, memory))
            engine = await _start_engine(runtime, model, machines, use)
        stack.push_async_callback(engine.close)
        # Peers may never come; a drain must not wait for them.
        parts = await run_unless(runtime.drain, _connect_peers(runtime, model, engine, memory, use))
        if parts is None:
            return
        stack.push_async_callback(parts.environment.wait_until_closed)
        server = rpc.server(token=runtime.token, most_streams=parts.service.MOST_STREAMS)
        rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(parts.service, server)
        serving = await stack.enter_async_context(runtime.serving(server))
        freeze_loaded_objects()
        runtime.report_status(lambda: _make_status(parts.service))
        await runtime.announce(serving.address)
        runtime.log.info("serving", address=serving.address, worker=runtime.worker_id)
        try:
            await run_until_first(
                _work_until_drained(parts, runtime.drain),
                parts.follower.keep_updating(),
                parts.environment.keep_renewing(),
                _watch_engine(engine, parts.burn_in),
                _keep_reporting(parts, engine, serving, use),
            )
        except EngineDead as error:
            # A Ctrl-C reaches the engine's own process too: no failure when draining anyway.
            if not runtime.drain.is_set():
                raise _engine_dead(error) from error


async def _connect_peers(
    runtime: Runtime[RolloutConfig],
    model: "ModelFiles",
    engine: "Engine",
    memory: Path,
    use: "ServiceUse | None",
) -> "_WorkerParts":
    from flotilla_common.rpc import rpc
    from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
    from flotilla_rollout.adapters.learner import GroupClient
    from flotilla_rollout.adapters.learner_calls import RunEpoch
    from flotilla_rollout.adapters.policy_feed import PolicyClient
    from flotilla_rollout.episodes.episode import AttemptRunner
    from flotilla_rollout.work.burn_in import BurnIn
    from flotilla_rollout.work.weight_updater import WeightUpdater

    config, watchdog = runtime.config, runtime.watchdog
    learner = await runtime.peers.channel("learner")
    gateway = await runtime.peers.channel("env_gateway")
    identity, epoch = _make_identity(runtime, model), RunEpoch()
    environment = GatewayEnvironment(
        gateway,
        run_id=runtime.run_id,
        worker_id=runtime.worker_id,
        renew_interval_s=config.renew_interval_s,
        family=model.vision,
    )
    limits = config.attempt_limits(runtime.shared.policy)
    runner = AttemptRunner(
        engine, environment, model.tokenizer, model.dialect, limits, watchdog, model.vision
    )
    weights = partial(rpc.channel, token=runtime.token, tls=runtime.tls, peer="learner")
    # Sent weights are always whole.
    adapted = runtime.shared.policy.adapter_rank is not None
    transfers = () if adapted else config.engine.transfers
    devices = await engine.identify_devices() if "ipc" in transfers else ()
    feed = PolicyClient(
        learner, identity, epoch, weights=weights, transfers=transfers, device_ids=devices
    )
    patience_s = runtime.shared.policy.tinker.patience_s if use else 0.0
    staged = memory / "staged.safetensors"
    follower = WeightUpdater(feed, engine, staged, watchdog, patience_s=patience_s)
    groups = GroupClient(learner, identity, epoch)
    burn_in = BurnIn(
        engine,
        config.burn_in_lengths(runtime.shared.policy.max_model_len),
        config.burn_in_hints,
        model.tokenizer.draw_ordinary,
        follower.wait_for_first_weights,
        model.vision,
    )
    return _make_parts(runtime, engine, environment, groups, runner, follower, burn_in, use)


def _make_parts(
    runtime: Runtime[RolloutConfig],
    engine: "Engine",
    environment: "GatewayEnvironment",
    groups: "GroupClient",
    runner: "AttemptRunner",
    follower: "WeightUpdater",
    burn_in: "BurnIn",
    use: "ServiceUse | None",
) -> "_WorkerParts":
    from flotilla_rollout.api.rollout_service import RolloutService
    from flotilla_rollout.work.worker import Worker

    config = runtime.config
    worker = Worker(
        groups,
        runner,
        lambda: engine.policy,
        config.options,
        watchdog=runtime.watchdog,
        settled=follower.wait_until_judged,
        waits=lambda: use is not None and bool(use.reason),
    )
    service = RolloutService(
        runtime.worker_id,
        worker,
        follower,
        burn_in,
        runner,
        lambda: engine.policy,
        runtime.drain,
        config.attempt_timeout_s,
        use,
    )
    return _WorkerParts(environment, follower, burn_in, worker, service)


async def _work_until_drained(parts: "_WorkerParts", drain: asyncio.Event) -> None:
    from flotilla_common.aio.concurrency import run_unless

    await run_unless(drain, parts.burn_in.run_once())
    await parts.worker.run_until_drained(drain)


async def _watch_engine(engine: "Engine", burn_in: "BurnIn") -> None:
    raise burn_in.explain_death(await engine.wait_until_dead())


def _engine_dead(error: Exception) -> Exception:
    """Return the error that ends the process with the exit code for "retryable"."""
    import grpc

    from flotilla_common.rpc.errors import ServiceError

    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", str(error), domain="rollout.flotilla"
    )


def _make_status(service: "RolloutService") -> ReplicaStatus:
    ready = service.phase in ("sampling", "updating", "waiting")
    metrics = service.collect_metrics()
    return ReplicaStatus(service.phase, ready, metrics=metrics, alarms=service.alarms)


async def _keep_reporting(
    parts: "_WorkerParts", engine: "Engine", serving: "Serving", use: "ServiceUse | None"
) -> None:
    """Keep health and metrics in line with the worker's state."""
    from flotilla_rollout.api import prometheus

    while True:
        version = engine.policy.version if engine.policy else -1
        prometheus.show_worker_metrics(parts.worker, version, parts.burn_in.metrics, use)
        serving.set_serving(_make_status(parts.service).serving)
        await asyncio.sleep(STATUS_INTERVAL_S)


def check_here(shared: SharedConfig, config: RolloutConfig) -> str:
    """Check the packages and the model of this machine, in a process that does nothing else; return
    what could not be checked.

    Raises ConfigError."""
    from flotilla_common.adapters.hidden_torch import hide_torch

    if not _may_need_torch(shared, config):
        hide_torch()
    from flotilla_rollout.adapters.vllm_arguments import check_engine_options

    unseen = (check_engine_options(config.engine), check_dialect(shared, config))
    return "; ".join(each for each in unseen if each)


def _may_need_torch(shared: SharedConfig, config: RolloutConfig) -> bool:
    """Return whether vLLM's options or parsers, or the model's own code, may need torch."""
    given = config.engine.options or config.dialect.parser
    return bool(given or shared.policy.trust_remote_code)


def prepare_service_use(shared: SharedConfig, config: RolloutConfig) -> "ServiceUse | None":
    """Return the book of what is used of a Tinker service, if one is the engine; then this process
    needs no torch. Raises ConfigError without the service's client."""
    if config.engine.kind != "tinker":
        return None
    from flotilla_common.adapters.hidden_torch import hide_torch
    from flotilla_common.process.extras import install_command
    from flotilla_rollout.work.service_use import ServiceUse

    if find_spec("tinker") is None:
        raise ConfigError(
            'rollout.engine.kind = "tinker": Tinker\'s client is not installed;'
            f" {install_command('tinker-engine')}"
        )
    if not _may_need_torch(shared, config):
        hide_torch()
    return ServiceUse()


def check_dialect(shared: SharedConfig, config: RolloutConfig) -> str:
    """Rehearse the dialect of a model that is on this machine; return why that was impossible.

    Raises ConfigError."""
    if not Path(shared.policy.model).is_dir():
        return f"the dialect of {shared.policy.model} is rehearsed once it has been downloaded"
    if find_spec("transformers") is None or find_spec("renderers") is None:
        return "the dialect is rehearsed where the rollout's packages are installed"
    from flotilla_rollout.adapters.dialect_search import check_model_folder

    check_model_folder(Path(shared.policy.model), shared.policy, config.dialect)
    return ""


@asynccontextmanager
async def _joined_machines(
    runtime: Runtime[RolloutConfig], model: "ModelFiles", memory: Path
) -> "AsyncGenerator[EngineMachines | None]":
    """Join the machines of an engine that spans several. They are dismissed if the block ends well,
    else they wait for the next rollout. Raises ConfigError, ServiceError."""
    engine = runtime.config.engine
    if engine.nodes == 1:
        yield None
        return
    from flotilla_common.ray_cluster.ray_node import check_ray_is_installed
    from flotilla_rollout.adapters.engine_machines import EngineMachines, HeadSite
    from flotilla_rollout.ports import EngineDead

    check_ray_is_installed(f"rollout.engine.nodes = {engine.nodes}")
    host = _shared_address(runtime)
    logs = runtime.run_dir.absolute() / "logs"
    site = HeadSite(runtime.replica, runtime.token, host, logs, memory, model.folder)
    try:
        machines = await EngineMachines.open_machines(engine, site)
    except EngineDead as error:
        raise _engine_dead(error) from error
    machines.drain_when_one_leaves(runtime.drain)
    try:
        yield machines
        await machines.dismiss_machines()
    finally:
        await machines.close()


def _shared_address(runtime: Runtime[RolloutConfig]) -> str:
    """Return this machine's address in the network of the engine's machines. Raises ConfigError."""
    host, _ = split_host_port(runtime.listen, "listen")
    if host == "0.0.0.0":
        raise ConfigError(
            f"--listen {runtime.listen}: with rollout.engine.nodes above 1, listen on this"
            " machine's own address in the network that the machines share; workers use no other"
        )
    return host


async def _start_engine(
    runtime: Runtime[RolloutConfig],
    model: "ModelFiles",
    machines: "EngineMachines | None",
    use: "ServiceUse | None",
) -> "Engine":
    if use is not None:
        return await _start_tinker(runtime, model, use)
    config = runtime.config
    if config.engine.kind == "fake":
        from flotilla_rollout.adapters.fake import FakeEngine

        return FakeEngine(model.tokenizer, model.dialect.stop_ids[0])
    from flotilla_rollout.adapters.vllm_options import ServedModel
    from flotilla_rollout.adapters.vllm_start import start_engines
    from flotilla_rollout.ports import EngineDead

    # Only the dialect's and the model's ends of a turn: a stop at `</tool_call>` would cut thinking
    # and arguments that name the tag, and the policy would never learn to end its turn.
    stop = model.dialect.stop_ids
    served = ServedModel(model.folder, runtime.shared.policy, stop)
    try:
        return await start_engines(config.engine, served, machines)
    except EngineDead as error:
        raise _engine_dead(error) from error


async def _start_tinker(
    runtime: Runtime[RolloutConfig], model: "ModelFiles", use: "ServiceUse"
) -> "Engine":
    from flotilla_rollout.adapters.tinker_engine import TinkerEngine
    from flotilla_rollout.ports import EngineDead

    tinker, stop = runtime.shared.policy.tinker, model.dialect.stop_ids
    seeded = runtime.config.engine.seeded
    try:
        return await TinkerEngine.start_engine(tinker, runtime.run_id, stop, use, seeded=seeded)
    except EngineDead as error:
        raise _engine_dead(error) from error


def _make_identity(runtime: Runtime[RolloutConfig], model: "ModelFiles") -> "WorkerIdentity":
    from flotilla_common.weights.fingerprint import tokenizer_digests
    from flotilla_rollout.adapters.learner_calls import IMAGES, WorkerIdentity

    return WorkerIdentity(
        worker_id=runtime.worker_id,
        incarnation=runtime.incarnation,
        device_count=runtime.config.engine.workers,
        tokenizer=tokenizer_digests(model.folder),
        capabilities=(IMAGES,) if model.vision else (),
    )


def main() -> NoReturn:
    """Run a rollout process from its command line, and exit the process."""
    run_service_process(
        "rollout", RolloutConfig, load, doc=DOC, registry=load_registry, check=check_here
    )


if __name__ == "__main__":
    main()
