"""What machines cost, from the catalog that SkyPilot keeps on this machine; SkyPilot not needed."""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.launcher.backends.sky.resources import accelerator, cloud_of, region_of
from services.launcher.config.sky import Machine, Machines

CATALOG_VERSION = "v8"
_FILE = "vms.csv"


@dataclass(frozen=True, slots=True)
class Catalog:
    """SkyPilot's folder, `~/.sky`. Nothing in it is no error: then nobody knows a price."""

    home: Path

    def cheapest(self, machines: Machines) -> float | None:
        return cheapest(machines, self.price)

    def price(self, machine: Machine) -> float | None:
        """$/h of one machine; None where the catalog shows none that fits."""
        if cloud_of(machine) == "slurm":
            return self._slurm(machine)
        return min((price for price, _ in self._offered(machine)), default=None)

    def memory(self, machine: Machine) -> float | None:
        """GiB of the cheapest machine that fits, the smallest of them; None where none is known."""
        offered = [(price, _number(row, "MemoryGiB")) for price, row in self._offered(machine)]
        return min(((p, gib) for p, gib in offered if gib is not None), default=(0, None))[1]

    def _offered(self, machine: Machine) -> Iterator[tuple[float, Mapping[str, str]]]:
        """Machines of the catalog that fit and are not too dear, with their prices."""
        region, most = region_of(machine), machine.max_hourly_cost or float("inf")
        for row in self._rows(cloud_of(machine)):
            if region not in ("", row.get("Region")) or not _fits(row, machine):
                continue
            price = _number(row, "SpotPrice" if machine.use_spot else "Price")
            if price is not None and price <= most:
                yield price, row

    def _rows(self, cloud: str) -> Iterator[Mapping[str, str]]:
        folder = self.home / "catalogs" / CATALOG_VERSION
        for path in sorted(folder.glob(f"{cloud or '*'}/{_FILE}")):
            with path.open(newline="", encoding="utf-8") as file:
                yield from csv.DictReader(file)

    def _slurm(self, machine: Machine) -> float | None:
        """A cluster's own prices per CPU, GiB and GPU, as its users agreed on them."""
        pricing = self._config().get("slurm", {}).get("pricing")
        if not pricing:
            return None
        name, count = accelerator(machine.accelerators) or ("", 0.0)
        cores, memory = _least(machine.cpus) or 0, _least(machine.memory) or 0
        listed = pricing.get("accelerators") or {}
        gpus = {gpu.lower(): price for gpu, price in listed.items()}.get(name, 0) * count
        return gpus + pricing.get("cpu", 0) * cores + pricing.get("memory", 0) * memory

    def _config(self) -> Mapping[str, Any]:
        path = self.home / "config.yaml"
        if not path.exists():
            return {}
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}


def cheapest(machines: Machines, price: Callable[[Machine], float | None]) -> float | None:
    """$/h of a replica on the candidate that would be taken if all were to be had, of those whose
    price is known."""
    found = [each for each in map(price, machines.candidates) if each is not None]
    if not found:
        return None
    return (found[0] if machines.ordered else min(found)) * machines.num_nodes


def _fits(row: Mapping[str, str], machine: Machine) -> bool:
    name = row.get("AcceleratorName", "").lower()
    has = (name, _number(row, "AcceleratorCount")) if name else None
    if has != accelerator(machine.accelerators):
        return False
    wishes = ((machine.cpus, "vCPUs"), (machine.memory, "MemoryGiB"))
    return all(_enough(_number(row, column), wish) for wish, column in wishes)


def _enough(has: float | None, wish: str | None) -> bool:
    least = _least(wish)
    if least is None:
        return True
    if has is None:
        return False
    return has >= least if (wish or "").endswith("+") else has == least


def _least(wish: str | None) -> float | None:
    """4 of `4+`. SkyPilot also knows `4x`, per CPU, which says nothing about the sum."""
    text = (wish or "").removesuffix("+")
    try:
        return float(text)
    except ValueError:
        return None


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column) or ""
    try:
        return float(text)
    except ValueError:
        return None
