"""What this machine has."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.shared_memory import SHARED_MEMORY
from services.launcher.backends.local.backend import visible_gpus
from services.launcher.doctor.probe_process import output_of

_MIB = 2**20
_ASK_GPUS = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Machine:
    """In bytes; `gpus` has the memory of each, `disk` and `shared` what is free."""

    memory: int
    free_memory: int
    gpus: tuple[int, ...]
    disk: int
    shared: int
    shared_total: int


async def this_machine(folder: Path) -> Machine:
    """With the disk that `folder` is on, or will be."""
    memory, shared = psutil.virtual_memory(), await asyncio.to_thread(_shared)
    return Machine(
        memory=memory.total,
        free_memory=memory.available,
        gpus=await _gpus(),
        disk=await asyncio.to_thread(_disk, folder),
        shared=shared[0],
        shared_total=shared[1],
    )


def _disk(folder: Path) -> int:
    absolute = folder.absolute()
    there = next(path for path in (absolute, *absolute.parents) if path.exists())
    return shutil.disk_usage(there).free


def _shared() -> tuple[int, int]:
    if not SHARED_MEMORY.is_dir():
        return 0, 0
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.free, usage.total


async def _gpus() -> tuple[int, ...]:
    """The memory of each GPU that may be used."""
    count = len(visible_gpus())
    if not count or shutil.which(_ASK_GPUS[0]) is None:
        return ()
    code, output, _ = await output_of(_ASK_GPUS, b"", os.environ)
    sizes = [int(line) * _MIB for line in output.split() if line.isdecimal()]
    return tuple(sizes[:count]) if code == 0 else ()
