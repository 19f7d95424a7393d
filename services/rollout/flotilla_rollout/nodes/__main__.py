"""A further machine of one rollout replica: a Ray node on which its engine places workers."""

from collections.abc import Awaitable, Callable

from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_rollout.config.rollout import RolloutConfig


def _load_worker() -> Callable[[Runtime[RolloutConfig]], Awaitable[None]]:
    return _run_machine


async def _run_machine(runtime: Runtime[RolloutConfig]) -> None:
    """Offer this machine until the rollout has ended. Raises ConfigError, TimeoutError."""
    import asyncio

    from flotilla_common.adapters.model_hub import stage_model
    from flotilla_common.ray_cluster import node_worker
    from flotilla_common.rpc.network_addresses import split_host_port
    from flotilla_rollout.adapters.engine_machines import machine_environment

    engine, policy, number = runtime.config.engine, runtime.shared.policy, runtime.replica
    node_worker.check_machine(number, "rollout.engine", engine.nodes)
    host, _ = split_host_port(await runtime.peers.address("rollout"), "rollout")
    with runtime.loading():
        model = await asyncio.to_thread(stage_model, policy.model, policy.revision)

    async def find_rollout() -> str:
        return host

    member = node_worker.MachineMembership(
        service="rollout",
        number=number,
        ray_port=engine.ray_port,
        port_key="rollout.engine.ray_port",
        join_s=engine.join_s,
        workers=engine.machine_workers,
        gpus=engine.machine_workers,
        environment=machine_environment(engine, model, host),
    )
    await node_worker.serve_machine(runtime, member, find_rollout)


if __name__ == "__main__":
    run_service_process("rollout", RolloutConfig, _load_worker, doc=__doc__ or "")
