"""Choice of the transport of weights: of the backend over which they are sent into a worker's
engine, when it attaches, and of the transport of each update."""

from collections.abc import Callable, Container

from flotilla_common.domain.policy import PolicyId
from flotilla_learner.config.learner import WeightsConfig
from flotilla_learner.weights.attached_worker import AttachedWorker


def choose_transfer(
    config: WeightsConfig,
    offered: Container[str],
    *,
    shares_memory: bool,
    has_device_ids: bool,
    sends_from_gpu: bool,
) -> str | None:
    """Choose one of the backends that a worker offers; None if its engine is sent no weights.

    `ipc` is used only if configured, and only if the sender has the engine's devices: an engine
    that can map its buffers can also read the published file itself, check all of it while serving,
    and keep the sender's buffers and context off a shared device."""
    wanted = config.transfer
    if wanted == "ipc":
        if shares_memory and has_device_ids and "ipc" in offered:
            return "ipc"
        wanted = "auto"
    if wanted == "auto":
        if shares_memory or config.network == "public":
            return None
        wanted = "nccl" if sends_from_gpu and "nccl" in offered else "gloo"
    return wanted if wanted in offered else None


def choose_transport(
    member: AttachedWorker,
    policy: PolicyId,
    can_send: Callable[[PolicyId, frozenset[str]], bool] | None,
) -> str:
    """Choose a member's transport: never into its engine while `fetch_next` is set."""
    if member.fetch_next and member.can_fetch:
        return "grpc"
    transfer = None if member.fetch_next else member.transfer
    if transfer and can_send and can_send(policy, member.shared_devices):
        return transfer
    return "shm" if member.shares_memory else "grpc"
