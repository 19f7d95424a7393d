"""Resources of this machine."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.weights.shared_memory import SHARED_MEMORY
from services.launcher.backends.local.gpu_reservations import visible_gpus
from services.launcher.doctor.probe_process import run_command

_MIB = 2**20
_GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class MachineResources:
    """Resources in bytes; `gpus` has the memory of each GPU, `disk` and `shared` what is free."""

    memory: int
    free_memory: int
    gpus: tuple[int, ...]
    disk: int
    shared: int
    shared_total: int


async def measure_machine(folder: Path) -> MachineResources:
    """Measure this machine; its disk is the one that holds `folder`, or will."""
    memory, shared = psutil.virtual_memory(), await asyncio.to_thread(_shared_memory)
    return MachineResources(
        memory=memory.total,
        free_memory=memory.available,
        gpus=await _list_gpu_memory(),
        disk=await asyncio.to_thread(_free_disk, folder),
        shared=shared[0],
        shared_total=shared[1],
    )


def _free_disk(folder: Path) -> int:
    absolute = folder.absolute()
    there = next(path for path in (absolute, *absolute.parents) if path.exists())
    return shutil.disk_usage(there).free


def _shared_memory() -> tuple[int, int]:
    if not SHARED_MEMORY.is_dir():
        return 0, 0
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.free, usage.total


async def _list_gpu_memory() -> tuple[int, ...]:
    count = len(visible_gpus())
    if not count or shutil.which(_GPU_QUERY[0]) is None:
        return ()
    code, output, _ = await run_command(_GPU_QUERY, b"", os.environ)
    sizes = [int(line) * _MIB for line in output.split() if line.isdecimal()]
    return tuple(sizes[:count]) if code == 0 else ()
