"""The backend over which weights are sent into a worker's engine."""

from collections.abc import Container

from services.learner.config.learner import WeightsConfig


def choose_transfer(
    config: WeightsConfig,
    offered: Container[str],
    *,
    shares_memory: bool,
    has_device_ids: bool,
    sends_from_gpu: bool,
) -> str | None:
    """Choose one of the backends that a worker offers; None where its engine is sent no weights.

    Over `ipc` they are sent where the sender turns out to have the engine's devices, and only by
    choice: who can map its buffers can read the published file itself, check all of it while the
    engine serves on, and leave the sender's buffers and context off a device that is shared."""
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
