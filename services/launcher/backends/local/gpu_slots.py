"""Assignment of this machine's GPUs to replicas."""

import os
from pathlib import Path

import psutil

from services.launcher.backends.ports import BackendError


class GpuSlots:
    """Free GPUs, and those that replicas hold, by the replicas' names."""

    def __init__(self, gpus: list[str]) -> None:
        self._free = list(gpus)
        self._held: dict[str, list[str]] = {}
        self.total = len(gpus)

    def take_gpus(self, name: str, count: int) -> dict[str, str]:
        """Take GPUs for a replica; return the environment that limits it to them.

        Raises BackendError when too few are free."""
        if count == 0:
            return {}
        if count > len(self._free):
            raise BackendError(f"{name} needs {count} GPUs, {len(self._free)} are free")
        self._held[name] = [self._free.pop(0) for _ in range(count)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._held[name])}

    def reclaim_gpus(self, name: str, gpus: list[str]) -> None:
        """Record the GPUs of a replica that another launcher started."""
        self._held[name] = [gpu for gpu in gpus if gpu in self._free]
        self._free = [gpu for gpu in self._free if gpu not in gpus]

    def release_gpus(self, name: str) -> None:
        self._free = sorted([*self._free, *self._held.pop(name, [])])


def visible_gpus() -> list[str]:
    """List the GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu.strip() for gpu in listed.split(",") if gpu.strip()]
    devices = Path("/dev").glob("nvidia[0-9]*")
    return sorted(device.name.removeprefix("nvidia") for device in devices)


def gpus_of(pid: int) -> list[str]:
    try:
        listed = psutil.Process(pid).environ().get("CUDA_VISIBLE_DEVICES", "")
    except psutil.Error:
        return []
    return [gpu for gpu in listed.split(",") if gpu]
