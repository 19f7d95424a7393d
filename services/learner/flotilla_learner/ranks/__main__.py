"""Another machine of the learner: a Ray node, on which the learner places ranks."""

from collections.abc import Awaitable, Callable

from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.wire.registry import load_registry
from flotilla_learner.config.learner import LearnerConfig


def _load_worker() -> Callable[[Runtime[LearnerConfig]], Awaitable[None]]:
    from flotilla_common.ray_cluster import node_worker
    from flotilla_common.rpc.network_addresses import split_host_port
    from flotilla_learner.checkpoints.model_file_checks import check_model_files

    async def run_machine(runtime: Runtime[LearnerConfig]) -> None:
        rank, number = runtime.config.rank, runtime.replica
        node_worker.check_machine(number, "learner.rank", rank.nodes)
        check_model_files(runtime.shared.policy, runtime.run_dir)

        async def find_learner() -> str:
            address = await runtime.peers.address("learner")
            return split_host_port(address, "learner")[0]

        member = node_worker.MachineMembership(
            service="learner",
            number=number,
            ray_port=rank.ray_port,
            port_key="learner.rank.ray_port",
            join_s=rank.join_s,
            workers=rank.processes,
            gpus=rank.processes if rank.device == "cuda" else 0,
        )
        await node_worker.serve_machine(runtime, member, find_learner)

    return run_machine


if __name__ == "__main__":
    run_service_process(
        "learner", LearnerConfig, _load_worker, doc=__doc__ or "", registry=load_registry
    )
