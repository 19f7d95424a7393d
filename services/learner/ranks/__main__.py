"""A further machine of the learner: ranks that train with the learner's own."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from services.common.errors import ConfigError
from services.common.service_main import RegistryContract, Runtime, run_service_process
from services.learner.config.learner import LearnerConfig
from services.learner.ranks.machine_admission import Machine, WrongMachineError, machine_from_config

if TYPE_CHECKING:
    from services.learner.ranks.pending_calls import RankHandle


def _load_worker() -> Callable[[Runtime[LearnerConfig]], Awaitable[None]]:
    from services.common.adapters.model_hub import stage_model
    from services.learner.checkpoints.model_file_checks import check_model_files
    from services.learner.ranks.adapters.learner_client import GrpcLearnerClient
    from services.learner.ranks.machine_worker import MachineWorker
    from services.learner.ranks.rank_process import RankProcess, rank_environment

    async def run_machine(runtime: Runtime[LearnerConfig]) -> None:
        rank = runtime.config.rank
        machine = _own_machine(runtime)
        policy = runtime.shared.policy
        check_model_files(policy, runtime.run_dir)
        with runtime.loading():
            await asyncio.to_thread(stage_model, policy.model, policy.revision)

        async def start_ranks() -> "Sequence[RankHandle]":
            logs = runtime.run_dir / "logs"
            stem = f"learner-node-{machine.number}-rank"
            return [
                await RankProcess.spawn_rank(
                    f"training rank {machine.number * rank.processes + slot}",
                    logs / f"{stem}-{slot}.log",
                    rank_environment(rank),
                )
                for slot in range(rank.processes)
            ]

        learner = GrpcLearnerClient(lambda: runtime.peers.channel("learner"), machine)
        try:
            await MachineWorker(learner, start_ranks, runtime.drain, rank.join_s).run_until_over()
        except WrongMachineError as error:
            raise ConfigError(str(error)) from error

    return run_machine


def _own_machine(runtime: Runtime[LearnerConfig]) -> Machine:
    """Return the description of this machine; `--replica` is its number. Raises ConfigError."""
    number, nodes = runtime.replica, runtime.config.rank.nodes
    if not 0 < number < nodes:
        raise ConfigError(
            f"--replica {number}: learner.rank.nodes is {nodes}, so further machines of the learner"
            f" have the numbers 1 to {nodes - 1}; 0 runs `python -m services.learner` itself"
        )
    hostname = socket.gethostname()
    return machine_from_config(
        runtime.run_id, number, runtime.shared.policy, runtime.config, hostname
    )


def _registry_contract() -> RegistryContract:
    from flotilla.launcher.v1 import registry_service_pb2, registry_service_pb2_grpc

    return RegistryContract(registry_service_pb2_grpc.RegistryServiceStub, registry_service_pb2)


if __name__ == "__main__":
    run_service_process(
        "learner", LearnerConfig, _load_worker, doc=__doc__ or "", registry=_registry_contract
    )
