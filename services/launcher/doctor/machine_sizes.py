"""Sizes of the machines that a spec requests from SkyPilot, as far as the spec or SkyPilot's
catalog states them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.launcher.backends.sky.machine_candidates import machines_of, parse_accelerator
from services.launcher.backends.sky.price_catalog import PriceCatalog, parse_least
from services.launcher.config.sky import Machine, SkyConfig

_GIB = 2**30
# SkyPilot's own, where a candidate names none.
_DISK_GB = 256
# Memory of one GPU in GiB, by SkyPilot's name without its variants' suffixes.
_GPU_GIB: Mapping[str, int] = {
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
class MachineCapacity:
    """Capacity of one candidate, in bytes; 0 for what the spec leaves open. `sized`: the spec
    names its resources."""

    name: str
    memory: int
    gpus: int
    gpu_memory: int
    disk: int
    sized: bool


def list_capacities(sky: SkyConfig, service: str, home: Path) -> Iterator[MachineCapacity]:
    """Yield the capacities of a service's candidates. `home` is SkyPilot's folder, whose
    catalog supplies memory that a candidate leaves out."""
    catalog = PriceCatalog(home)
    for machine in machines_of(sky, service).candidates:
        yield _candidate_capacity(machine, catalog)


def _candidate_capacity(machine: Machine, catalog: PriceCatalog) -> MachineCapacity:
    memory = parse_least(machine.memory) or catalog.machine_memory(machine) or 0.0
    kind, count = parse_accelerator(machine.accelerators) or ("", 0)
    words = (machine.infra, machine.accelerators, machine.memory and f"{machine.memory} GiB")
    # Slurm and Kubernetes may have their GPUs in a partition or a pod, and name none.
    cloud = (machine.infra or "").split("/")[0]
    return MachineCapacity(
        name=" ".join(word for word in words if word) or "any machine",
        # `64+`: at least so many, so that is all to count on.
        memory=int(memory * _GIB),
        gpus=int(count),
        gpu_memory=gpu_bytes(kind),
        disk=(machine.disk_size or _DISK_GB) * 10**9,
        sized=bool(machine.infra or machine.cpus) and cloud not in ("slurm", "kubernetes", "ssh"),
    )


def gpu_bytes(kind: str) -> int:
    """Return the memory of one GPU; 0 if its kind is not known."""
    known = [name for name in _GPU_GIB if kind.upper().startswith(name.upper())]
    return _GPU_GIB[max(known, key=len)] * _GIB if kind and known else 0
