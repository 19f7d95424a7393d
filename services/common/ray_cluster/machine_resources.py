"""Machines of a cluster, told apart by the resources that they offer to Ray."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Offered by a machine for each process that the service may place there.
WORKER_RESOURCE = "flotilla_worker"
_MACHINE_RESOURCE = "flotilla_machine_"


def machine_resource(number: int) -> str:
    """Return the resource that machine `number` alone offers."""
    return f"{_MACHINE_RESOURCE}{number}"


def machine_number(resources: Iterable[str]) -> int | None:
    """Return which machine offers these resources; None for one that is none of ours."""
    for name in resources:
        if name.startswith(_MACHINE_RESOURCE):
            return int(name.removeprefix(_MACHINE_RESOURCE))
    return None


def machine_offers(number: int, workers: int) -> Mapping[str, float]:
    """Return what machine `number` offers besides GPUs."""
    return {WORKER_RESOURCE: workers, machine_resource(number): 1}


@dataclass(frozen=True, slots=True)
class ExpectedMachines:
    """Machines that a service waits for, `machines` with its own, each with `workers` processes.

    Once `join_s` are over, as many as make `least` processes in all suffice. Of the rest,
    `program` is what runs on a further machine, `workers_key` the key of the spec that gives
    `workers`, and `remedy` what else to do when machines are missing."""

    machines: int
    workers: int
    least: int
    join_s: float
    program: str
    workers_key: str
    remedy: str

    def to_message(self) -> dict[str, Any]:
        """Return the fields as JSON takes them."""
        return asdict(self)
