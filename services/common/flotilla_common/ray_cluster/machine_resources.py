"""Machines of a cluster, identified by the resources that they offer to Ray."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# A machine offers one of these for each process that the service may place there.
WORKER_RESOURCE = "flotilla_worker"
_MACHINE_RESOURCE = "flotilla_machine_"


def machine_resource(number: int) -> str:
    """Return the resource that machine `number` alone offers."""
    return f"{_MACHINE_RESOURCE}{number}"


def machine_number(resources: Iterable[str]) -> int | None:
    """Return the number of the machine that offers these resources; None if it is not ours."""
    for name in resources:
        if name.startswith(_MACHINE_RESOURCE):
            return int(name.removeprefix(_MACHINE_RESOURCE))
    return None


def machine_offers(number: int, workers: int) -> Mapping[str, float]:
    """Return the resources that machine `number` offers besides GPUs."""
    return {WORKER_RESOURCE: workers, machine_resource(number): 1}


@dataclass(frozen=True, slots=True)
class ExpectedMachines:
    """Machines that a service waits for: `machines` including its own, each with `workers`
    processes.

    After `join_s`, machines for `least` processes in all suffice. The rest is for messages:
    `program` runs on a further machine, `workers_key` is the spec's key for `workers`, and `remedy`
    is the alternative if machines are missing."""

    machines: int
    workers: int
    least: int
    join_s: float
    program: str
    workers_key: str
    remedy: str

    def to_message(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)
