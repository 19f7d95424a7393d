"""A further machine of one rollout replica: a Ray node on which its engine places workers."""

from collections.abc import Awaitable, Callable

from services.common.errors import ConfigError
from services.common.service_main import Runtime, run_service_process
from services.rollout.config.rollout import RolloutConfig


def _load_worker() -> Callable[[Runtime[RolloutConfig]], Awaitable[None]]:
    return _run_machine


async def _run_machine(runtime: Runtime[RolloutConfig]) -> None:
    """Offer this machine until the rollout has ended. Raises ConfigError, TimeoutError."""
    import asyncio

    from services.common.adapters.model_hub import stage_model
    from services.common.network_addresses import split_host_port
    from services.common.ray_cluster.node_folder import NodeFolder
    from services.common.ray_cluster.node_worker import MachineMembership, NodeWorker
    from services.common.ray_cluster.ray_node import check_ray_is_installed
    from services.common.shared_memory import private_folder, shared_name
    from services.rollout.adapters.engine_machines import machine_environment

    engine, policy, number = runtime.config.engine, runtime.shared.policy, runtime.replica
    _check_number(number, engine.nodes)
    check_ray_is_installed(f"rollout.engine.nodes = {engine.nodes}")
    host, _ = split_host_port(await runtime.peers.address("rollout"), "rollout")
    with runtime.loading():
        model = await asyncio.to_thread(stage_model, policy.model, policy.revision)

    async def find_rollout() -> str:
        return host

    member = MachineMembership(
        service="rollout",
        number=number,
        ray_port=engine.ray_port,
        port_key="rollout.engine.ray_port",
        join_s=engine.join_s,
        workers=engine.machine_workers,
        gpus=engine.machine_workers,
        environment=machine_environment(engine, model, host),
    )
    name = f"{shared_name(runtime.run_id, runtime.run_dir)}-rollout-node-{number}"
    with private_folder(name) as memory:
        folder = NodeFolder(memory, runtime.run_dir.absolute() / "logs")
        worker = NodeWorker(find_rollout, member, runtime.token, folder, runtime.drain)
        await worker.run_until_over()


def _check_number(number: int, nodes: int) -> None:
    """Raise ConfigError if `--replica` is not one of an engine's further machines."""
    if not 0 < number < nodes:
        raise ConfigError(
            f"--replica {number}: rollout.engine.nodes is {nodes}, so further machines of the"
            f" engine have the numbers 1 to {nodes - 1}; 0 runs `python -m services.rollout` itself"
        )


if __name__ == "__main__":
    run_service_process("rollout", RolloutConfig, _load_worker, doc=__doc__ or "")
