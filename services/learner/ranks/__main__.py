"""Another machine of the learner: a Ray node, on which the learner places ranks."""

from collections.abc import Awaitable, Callable

from services.common.errors import ConfigError
from services.common.service_main import RegistryContract, Runtime, run_service_process
from services.learner.config.learner import LearnerConfig


def _load_worker() -> Callable[[Runtime[LearnerConfig]], Awaitable[None]]:
    from services.common.network_addresses import split_host_port
    from services.common.ray_cluster.node_folder import NodeFolder
    from services.common.ray_cluster.node_worker import MachineMembership, NodeWorker
    from services.common.ray_cluster.ray_node import check_ray_is_installed
    from services.common.shared_memory import private_folder, shared_name
    from services.learner.checkpoints.model_file_checks import check_model_files

    async def run_machine(runtime: Runtime[LearnerConfig]) -> None:
        rank, number = runtime.config.rank, runtime.replica
        _check_number(number, rank.nodes)
        check_ray_is_installed(f"learner.rank.nodes = {rank.nodes}")
        check_model_files(runtime.shared.policy, runtime.run_dir)

        async def find_learner() -> str:
            address = await runtime.peers.address("learner")
            return split_host_port(address, "learner")[0]

        member = MachineMembership(
            service="learner",
            number=number,
            ray_port=rank.ray_port,
            port_key="learner.rank.ray_port",
            join_s=rank.join_s,
            workers=rank.processes,
            gpus=rank.processes if rank.device == "cuda" else 0,
        )
        name = f"{shared_name(runtime.run_id, runtime.run_dir)}-learner-node-{number}"
        with private_folder(name) as marks:
            folder = NodeFolder(marks, runtime.run_dir.absolute() / "logs")
            worker = NodeWorker(find_learner, member, runtime.token, folder, runtime.drain)
            await worker.run_until_over()

    return run_machine


def _check_number(number: int, nodes: int) -> None:
    """Raise ConfigError if `--replica` is not one of the learner's other machines."""
    if not 0 < number < nodes:
        raise ConfigError(
            f"--replica {number}: learner.rank.nodes is {nodes}, so the learner's other machines"
            f" have the numbers 1 to {nodes - 1}; 0 runs `python -m services.learner` itself"
        )


def _registry_contract() -> RegistryContract:
    from flotilla.launcher.v1 import registry_service_pb2, registry_service_pb2_grpc

    return RegistryContract(registry_service_pb2_grpc.RegistryServiceStub, registry_service_pb2)


if __name__ == "__main__":
    run_service_process(
        "learner", LearnerConfig, _load_worker, doc=__doc__ or "", registry=_registry_contract
    )
