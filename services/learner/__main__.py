"""The learner: gives out groups to sample, takes trajectories back, trains and publishes."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.errors import ConfigError
from services.common.network import split
from services.common.service_main import RegistryContract, Runtime, entry
from services.common.shared_memory import private_folder, shared_name
from services.common.spec import PolicyConfig
from services.learner.config.learner import LearnerConfig
from services.learner.ports import RemoteStore
from services.learner.ranks.machine_admission import machine_of

if TYPE_CHECKING:
    from services.learner.ranks.local import LocalRanks
    from services.learner.ranks.machines import Roll
    from services.learner.ranks.rendezvous import Meeting


def _load() -> Callable[[Runtime[LearnerConfig]], Awaitable[None]]:
    from services.learner.alarms.adapters.sinks import alarm_sinks_of
    from services.learner.app import run_learner
    from services.learner.checkpoints.adapters.model_assets import tokenizer_digests_of
    from services.learner.checkpoints.model_files import check_model_files
    from services.learner.dependencies import Vendors
    from services.learner.tracking.build import trackers_of
    from services.learner.weights.weight_server_process import WeightServer, start_of

    async def run(runtime: Runtime[LearnerConfig]) -> None:
        with private_folder(f"{_name(runtime)}-learner") as memory:
            await run_in(memory, runtime)

    async def run_in(memory: Path, runtime: Runtime[LearnerConfig]) -> None:
        logs = runtime.run_dir / "logs"
        policy = runtime.shared.policy
        check_model_files(policy, runtime.run_dir)
        tokenizer = tokenizer_digests_of(policy)
        roll = _roll(runtime)
        meeting = _meeting(runtime, roll) if roll is not None else None
        ranks = _ranks(runtime, memory, meeting)
        weights = WeightServer(logs / "learner-weights.log")
        tracking = runtime.config.tracking
        tracker = trackers_of(tracking, runtime.run_id, runtime.run_dir, runtime.spec)
        sinks = alarm_sinks_of(runtime.config.alarms, runtime.run_id, runtime.run_dir)
        try:
            address = await weights.start(start_of(runtime))
            store = _store(runtime)
            vendors = Vendors(
                ranks, tracker, tokenizer, weights, address, store, sinks, _exporter(policy), roll
            )
            await run_learner(runtime, vendors)
        finally:
            await ranks.close()
            await weights.close()
            await asyncio.to_thread(tracker.close)
            for sink in sinks:
                await asyncio.to_thread(sink.close)

    return run


def _name(runtime: Runtime[LearnerConfig]) -> str:
    return shared_name(runtime.run_id, runtime.run_dir)


def _ranks(
    runtime: Runtime[LearnerConfig], memory: Path, meeting: "Meeting | None"
) -> "LocalRanks":
    from services.learner.ranks.local import LocalRanks

    log = runtime.run_dir / "logs" / "learner-rank-0.log"
    policy = runtime.shared.policy
    return LocalRanks(_name(runtime), policy, runtime.config, log, memory, meeting)


def _roll(runtime: Runtime[LearnerConfig]) -> "Roll | None":
    """Of the learner's further machines, if it has any."""
    if runtime.config.rank.nodes == 1:
        return None
    # Not above: the configuration is checked where there are no tensors.
    from services.learner.ranks.machines import Roll

    policy, config = runtime.shared.policy, runtime.config
    return Roll(machine_of(runtime.run_id, 0, policy, config, socket.gethostname()))


def _meeting(runtime: Runtime[LearnerConfig], roll: "Roll") -> "Meeting":
    """Where the machines reach the learner, there its first rank is reached."""
    from services.learner.ranks.rendezvous import AcrossMachines

    host, _ = split(runtime.listen, "listen")
    if host == "0.0.0.0":
        raise ConfigError(
            f"--listen {runtime.listen}: with learner.rank.nodes above 1, listen on this machine's"
            " own address in the network that the machines share; ranks use no other"
        )
    rank = runtime.config.rank
    return AcrossMachines(roll, host, rank.processes, rank.join_s)


def _exporter(policy: PolicyConfig) -> Callable[[Path, Path], None]:
    from services.learner.checkpoints.adapters.model_assets import assets_of
    from services.learner.checkpoints.export import export

    return lambda checkpoint, out: export(checkpoint, assets_of(policy), policy, out)


def _store(runtime: Runtime[LearnerConfig]) -> RemoteStore | None:
    """Where the run's checkpoints are uploaded to, if anywhere."""
    checkpoint = runtime.config.checkpoint
    if checkpoint.remote is None:
        return None
    from services.learner.checkpoints.adapters.fsspec_store import open_store

    return open_store(f"{checkpoint.remote}/{runtime.run_id}", checkpoint.remote_options)


def _registry() -> RegistryContract:
    from flotilla.launcher.v1 import registry_service_pb2, registry_service_pb2_grpc

    return RegistryContract(registry_service_pb2_grpc.RegistryServiceStub, registry_service_pb2)


if __name__ == "__main__":
    entry("learner", LearnerConfig, _load, doc=__doc__ or "", registry=_registry)
