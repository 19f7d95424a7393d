"""Choice of the backend over which weights are sent into a worker's engine."""

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
