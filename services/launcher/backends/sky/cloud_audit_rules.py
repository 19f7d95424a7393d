"""What clouds themselves list under a launcher's names, against what SkyPilot knows, pure.

SkyPilot finds machines by its own table alone. Once that has lost one, nobody but its cloud and
whoever pays knows of it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from services.launcher.backends.sky.resources import cloud_of
from services.launcher.config.sky import SkyConfig


@dataclass(frozen=True, slots=True)
class Machine:
    """One that a cloud bills. SkyPilot names it after its cluster, with more behind that."""

    identity: str
    name: str


class Provider(Protocol):
    """A cloud that is asked itself. Methods raise BackendUnreachable."""

    @property
    def cloud(self) -> str:
        """As in `infra`."""
        ...

    def available(self) -> bool:
        """Whether its key is here."""
        ...

    async def machines(self) -> list[Machine]:
        """All of the account that cost money."""
        ...

    async def end(self, machines: Iterable[Machine]) -> None: ...


def clouds_of(sky: SkyConfig) -> set[str]:
    """Where a run's machines may be; the empty name is any cloud."""
    wishes = (sky.learner, sky.env_gateway, sky.rollout)
    return {sky.cloud or cloud_of(machine) for wish in wishes for machine in wish.candidates}


def forgotten(
    machines: Iterable[Machine], ours: Callable[[str], bool], known: Collection[str]
) -> list[Machine]:
    """Those with such a name that are of no cluster that is known."""
    return [
        machine
        for machine in machines
        if ours(machine.name)
        and not any(machine.name.startswith(f"{cluster}-") for cluster in known)
    ]
