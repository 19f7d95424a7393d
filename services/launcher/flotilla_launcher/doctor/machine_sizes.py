"""Sizes of the machines that a spec requests from SkyPilot, as far as the spec or SkyPilot's
catalog states them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla_launcher.backends.sky.machine_candidates import machines_of, parse_accelerator
from flotilla_launcher.backends.sky.price_catalog import PriceCatalog, parse_least
from flotilla_launcher.config.sky import SkyConfig

_GIB = 2**30
# SkyPilot's own, where a candidate names none.
_DISK_GB = 256
# GPUs by the GiB of their memory: SkyPilot's names without their variants' suffixes.
_GPUS_OF_GIB: Mapping[int, Sequence[str]] = {
    180: ("B200",),
    141: ("H200",),
    96: ("GH200", "RTXPRO6000"),
    80: ("H100", "A100-80GB"),
    48: ("L40S", "L40", "RTX6000-Ada", "A6000", "A40"),
    40: ("A100",),
    32: ("RTX5090", "V100-32GB"),
    24: ("RTX4090", "RTX3090", "A10G", "A10", "L4"),
    16: ("V100", "T4"),
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
        memory = parse_least(machine.memory) or catalog.machine_memory(machine) or 0.0
        kind, count = parse_accelerator(machine.accelerators) or ("", 0)
        words = (machine.infra, machine.accelerators, machine.memory and f"{machine.memory} GiB")
        # Slurm and Kubernetes may have their GPUs in a partition or a pod, and name none.
        nameless = (machine.infra or "").split("/")[0] in ("slurm", "kubernetes", "ssh")
        yield MachineCapacity(
            name=" ".join(word for word in words if word) or "any machine",
            # `64+`: at least so many, so that is all to count on.
            memory=int(memory * _GIB),
            gpus=int(count),
            gpu_memory=_gpu_bytes(kind),
            disk=(machine.disk_size or _DISK_GB) * 10**9,
            sized=bool(machine.infra or machine.cpus) and not nameless,
        )


def _gpu_bytes(kind: str) -> int:
    """Return the memory of one GPU; 0 if its kind is not known."""
    sizes = {name: size for size, names in _GPUS_OF_GIB.items() for name in names}
    known = [name for name in sizes if kind.upper().startswith(name.upper())]
    return sizes[max(known, key=len)] * _GIB if known else 0
