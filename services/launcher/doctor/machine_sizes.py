"""How large the machines are that a spec asks SkyPilot for, as far as it or SkyPilot's catalog says
so."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.launcher.backends.sky.price_catalog import Catalog
from services.launcher.backends.sky.resources import accelerator, machines_of
from services.launcher.config.sky import Machine, SkyConfig

_GIB = 2**30
# SkyPilot's own, where a candidate names none.
_DISK_GB = 256
# Memory of one GPU in GiB, by SkyPilot's name without its variants' suffixes.
_GPUS: Mapping[str, int] = {
    "B200": 180,
    "H200": 141,
    "H100": 80,
    "GH200": 96,
    "A100-80GB": 80,
    "A100": 40,
    "L40S": 48,
    "L40": 48,
    "RTX6000-Ada": 48,
    "A6000": 48,
    "A40": 48,
    "RTXPRO6000": 96,
    "RTX5090": 32,
    "RTX4090": 24,
    "RTX3090": 24,
    "A10G": 24,
    "A10": 24,
    "L4": 24,
    "V100-32GB": 32,
    "V100": 16,
    "T4": 16,
}


@dataclass(frozen=True, slots=True)
class Room:
    """One candidate, in bytes; 0 for what the spec leaves open. `sized`: it names its resources."""

    name: str
    memory: int
    gpus: int
    gpu_memory: int
    disk: int
    sized: bool


def rooms(sky: SkyConfig, service: str, home: Path) -> Iterator[Room]:
    """Of the candidates that a service may be given. `home` is SkyPilot's folder: its catalog knows
    the memory of those that name none."""
    catalog = Catalog(home)
    for machine in machines_of(sky, service).candidates:
        yield _room(machine, catalog)


def _room(machine: Machine, catalog: Catalog) -> Room:
    memory = float(_digits(machine.memory)) or catalog.memory(machine) or 0.0
    kind, count = accelerator(machine.accelerators) or ("", 0)
    words = (machine.infra, machine.accelerators, machine.memory and f"{machine.memory} GiB")
    # Slurm and Kubernetes may have their GPUs in a partition or a pod, and name none.
    cloud = (machine.infra or "").split("/")[0]
    return Room(
        name=" ".join(word for word in words if word) or "any machine",
        # `64+`: at least so many, so that is all to count on.
        memory=int(memory * _GIB),
        gpus=int(count),
        gpu_memory=gpu_bytes(kind),
        disk=(machine.disk_size or _DISK_GB) * 10**9,
        sized=bool(machine.infra or machine.cpus) and cloud not in ("slurm", "kubernetes", "ssh"),
    )


def gpu_bytes(kind: str) -> int:
    """Memory of one; 0 where the kind is not known."""
    known = [name for name in _GPUS if kind.upper().startswith(name.upper())]
    return _GPUS[max(known, key=len)] * _GIB if kind and known else 0


def _digits(text: str | None) -> str:
    found = re.match(r"\d+(\.\d+)?", text or "")
    return found.group() if found else "0"
