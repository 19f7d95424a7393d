"""vLLM's executor on the machines that carry one engine (`rollout.engine.nodes`).

Its core, a process of vLLM, connects to the Ray cluster and places the same number of workers on
each machine, in the machines' order. vLLM imports this module in core and workers."""

import os
import signal
import threading
from typing import Any

import ray
from ray.runtime_env import RuntimeEnv
from ray.util.placement_group import PlacementGroup, placement_group
from vllm.distributed.device_communicators.cpu_communicator import (
    CpuCommunicator,
    _CPUSHMDistributed,  # pyright: ignore[reportPrivateUsage]
)
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from flotilla_common.process.tied_children import end_with_parent
from flotilla_common.ray_cluster.cluster_settings import HUB_TOKEN
from flotilla_common.ray_cluster.machine_resources import WORKER_RESOURCE, machine_resource
from flotilla_common.ray_cluster.node_folder import NodeFolder
from flotilla_common.weights.network_interfaces import choose_interface
from flotilla_rollout.adapters.engine_cluster import (
    REPLICA_VARIABLE,
    EngineCluster,
    MachineSite,
    worker_logs,
)

_PLACE_S = 60.0
# A core whose worker is gone may wait for its answer for ever.
_END_S = 5.0
# Each machine offers 1 of its resource, and each worker takes this fraction.
_SHARE = 0.0001

# Ray derives a worker's place on its machine from its GPU, and counts what a node declares.
if current_platform.is_cpu():
    type(current_platform).ray_device_key = "GPU"


class MachineWorker(RayWorkerProc):
    """A worker that reads the model and reaches the others by its own machine's settings."""

    def __init__(self, vllm_config: Any, rank: int, **given: Any) -> None:
        """Take the place of worker `rank`; its output goes to a log of its machine."""
        site = MachineSite.of_this_process()
        machine, slot = divmod(rank, site.each)
        _write_output_to(NodeFolder.of_this_node(), machine, slot)
        choose_interface(site.head)
        _separate_machines(machine)
        vllm_config.model_config.model = site.model
        super().__init__(vllm_config=vllm_config, rank=rank, **given)


class MachinesExecutor(RayExecutorV2):
    """vLLM's executor with workers on machines that have joined this run's cluster."""

    def _init_executor(self) -> None:
        end_with_parent()
        cluster = EngineCluster.of_this_process()
        # Every machine fetches the model itself, and Ray would send it in the clear.
        os.environ.pop(HUB_TOKEN, None)
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        signal.signal(signal.SIGTERM, handler)
        # vLLM names the class of its workers there.
        ray_executor_v2.RayWorkerProc = MachineWorker
        os.environ["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, range(cluster.workers)))
        variables = {REPLICA_VARIABLE: str(cluster.replica)}
        self.parallel_config.ray_runtime_env = RuntimeEnv(env_vars=variables)
        self.parallel_config.placement_group = _place_workers(cluster)
        super()._init_executor()

    def shutdown(self) -> None:
        """See the base class; a core that has lost a worker ends too, even while it waits."""
        super().shutdown()
        if self.is_failed:
            threading.Timer(_END_S, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _place_workers(cluster: EngineCluster) -> PlacementGroup:
    """Return the group with a bundle for each worker, in order. Raises RuntimeError."""
    bundles: list[dict[str, float]] = [
        {"GPU": 1, WORKER_RESOURCE: 1, machine_resource(worker // cluster.each): _SHARE}
        for worker in range(cluster.workers)
    ]
    group = placement_group(bundles)
    if not group.wait(_PLACE_S):
        raise RuntimeError(
            f"Ray has not placed {cluster.each} workers on each of {cluster.machines} machines in"
            f" {_PLACE_S:g} s: an older engine may still hold them, or one has fewer GPUs"
        )
    return group


def _separate_machines(machine: int) -> None:
    """Make workers on CPUs share memory only within one machine: vLLM takes all workers with the
    same name of it to be on one."""
    make_name = _CPUSHMDistributed.make_group_name

    def make_own_name(communicator: CpuCommunicator) -> str:
        return f"{make_name(communicator)}-{machine}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_own_name)


def _write_output_to(node: NodeFolder, machine: int, slot: int) -> None:
    """Redirect the output of this process and its libraries to a log that outlives Ray's own."""
    node.logs.mkdir(parents=True, exist_ok=True)
    log = os.open(
        node.logs / worker_logs(int(os.environ[REPLICA_VARIABLE]), machine, slot),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o644,
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
