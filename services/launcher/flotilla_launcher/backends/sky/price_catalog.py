"""Prices of machines, from the catalog that SkyPilot keeps on this machine; SkyPilot is not
needed."""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flotilla_common.text.parsing import as_object
from flotilla_launcher.backends.sky.machine_candidates import cloud_of, parse_accelerator, region_of
from flotilla_launcher.config.sky import Machine, Machines

CATALOG_VERSION = "v8"
_FILE = "vms.csv"


@dataclass(frozen=True, slots=True)
class PriceCatalog:
    """SkyPilot's folder, `~/.sky`. An empty one is no error: then no price is known."""

    home: Path

    def machine_price(self, machine: Machine) -> float | None:
        """Return $/h of one machine; None where the catalog shows none that fits."""
        if cloud_of(machine) == "slurm":
            return self._slurm_price(machine)
        return min((price for price, _ in self._iter_offered(machine)), default=None)

    def list_regions(self, machine: Machine) -> list[str]:
        """List the regions that offer such a machine, the cheapest first."""
        offered = sorted(self._iter_offered(machine), key=lambda each: each[0])
        return list(dict.fromkeys(row.get("Region") or "" for _, row in offered))

    def machine_memory(self, machine: Machine) -> float | None:
        """Return the GiB of the cheapest fitting machine, the smallest of equals; None where
        none is known."""
        offered = [
            (price, _parse_number(row, "MemoryGiB")) for price, row in self._iter_offered(machine)
        ]
        return min(((p, gib) for p, gib in offered if gib is not None), default=(0, None))[1]

    def _iter_offered(self, machine: Machine) -> Iterator[tuple[float, Mapping[str, str]]]:
        """Iterate over the catalog's machines that fit and are not too dear, with their prices."""
        region, most = region_of(machine), machine.max_hourly_cost or float("inf")
        for row in self._iter_rows(cloud_of(machine)):
            if region not in ("", row.get("Region")) or not _matches_machine(row, machine):
                continue
            price = _parse_number(row, "SpotPrice" if machine.use_spot else "Price")
            if price is not None and price <= most:
                yield price, row

    def _iter_rows(self, cloud: str) -> Iterator[Mapping[str, str]]:
        folder = self.home / "catalogs" / CATALOG_VERSION
        for path in sorted(folder.glob(f"{cloud or '*'}/{_FILE}")):
            with path.open(newline="", encoding="utf-8") as file:
                yield from csv.DictReader(file)

    def _slurm_price(self, machine: Machine) -> float | None:
        """Return a Slurm cluster's own price by CPU, GiB and GPU, as its users agreed on them."""
        pricing = self._read_config().get("slurm", {}).get("pricing")
        if not pricing:
            return None
        name, count = parse_accelerator(machine.accelerators) or ("", 0.0)
        cores, memory = parse_least(machine.cpus) or 0, parse_least(machine.memory) or 0
        listed = pricing.get("accelerators") or {}
        gpus = {gpu.lower(): price for gpu, price in listed.items()}.get(name, 0) * count
        return gpus + pricing.get("cpu", 0) * cores + pricing.get("memory", 0) * memory

    def _read_config(self) -> Mapping[str, Any]:
        path = self.home / "config.yaml"
        if not path.exists():
            return {}
        return as_object(yaml.safe_load(path.read_text(encoding="utf-8")))


def open_catalog() -> PriceCatalog:
    """Return the catalog of this machine's user."""
    return PriceCatalog(Path("~/.sky").expanduser())


def cheapest_price(machines: Machines, price: Callable[[Machine], float | None]) -> float | None:
    """Return $/h of a replica on the candidate that is taken if all are available, among those
    with a known price."""
    found = [each for each in map(price, machines.candidates) if each is not None]
    if not found:
        return None
    return (found[0] if machines.ordered else min(found)) * machines.num_nodes


def _matches_machine(row: Mapping[str, str], machine: Machine) -> bool:
    name = row.get("AcceleratorName", "").lower()
    has = (name, _parse_number(row, "AcceleratorCount")) if name else None
    if has != parse_accelerator(machine.accelerators):
        return False
    requirements = ((machine.cpus, "vCPUs"), (machine.memory, "MemoryGiB"))
    return all(
        _is_enough(_parse_number(row, column), required) for required, column in requirements
    )


def _is_enough(has: float | None, required: str | None) -> bool:
    least = parse_least(required)
    if least is None:
        return True
    if has is None:
        return False
    return has >= least if (required or "").endswith("+") else has == least


def parse_least(required: str | None) -> float | None:
    """Parse 4 of `4+`. SkyPilot also knows `4x`, per CPU, which does not give the sum."""
    text = (required or "").removesuffix("+")
    try:
        return float(text)
    except ValueError:
        return None


def _parse_number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(column) or ""
    try:
        return float(text)
    except ValueError:
        return None
