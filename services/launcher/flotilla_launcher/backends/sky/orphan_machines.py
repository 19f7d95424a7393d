"""Orphans among the machines that clouds bill: those under a launcher's names that SkyPilot does
not know. Pure.

SkyPilot finds machines by its own table alone. If the table loses one, only the cloud's list and
its bill show it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from flotilla_launcher.backends.sky.machine_candidates import cloud_of
from flotilla_launcher.config.sky import SkyConfig
from flotilla_launcher.state import SERVICES


@dataclass(frozen=True, slots=True)
class BilledMachine:
    """One machine that a cloud bills. SkyPilot names it after its cluster, with more behind
    that."""

    identity: str
    name: str


def list_clouds(sky: SkyConfig) -> set[str]:
    """Return the clouds where a run's machines may be; the empty name is any cloud."""
    return {
        sky.cloud or cloud_of(machine)
        for service in SERVICES
        for machine in sky.machines_for(service).candidates
    }


def find_orphans(
    machines: Iterable[BilledMachine], ours: Callable[[str], bool], known: Collection[str]
) -> list[BilledMachine]:
    """Return the machines with our names that belong to no known cluster.

    `ours` takes a name: one of an orphan (`orphan_names.py`), or one of a run that has ended."""
    return [
        machine
        for machine in machines
        if ours(machine.name)
        and not any(machine.name.startswith(f"{cluster}-") for cluster in known)
    ]
