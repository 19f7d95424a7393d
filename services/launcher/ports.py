"""What the launcher needs from whatever runs processes, in its own words."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.launcher.runs import Exit, Key, Unit


class BackendError(Exception):
    """A replica could not be started; the message says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One replica to start. `secrets` go into its environment and are written nowhere."""

    run_id: str
    key: Key
    command: tuple[str, ...]
    secrets: Mapping[str, str]
    log: Path
    gpus: int = 0

    @property
    def name(self) -> str:
        """Unique among all that the backend runs, and the same for every start of the replica."""
        return f"{self.run_id}/{self.key[0]}-{self.key[1]}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a backend would use for one replica: for people, and its own task file if it has one."""

    resources: str
    task_yaml: str = ""


class Backend(Protocol):
    """Runs replicas somewhere. All methods may be repeated; a name identifies a replica.

    Output of a replica is appended to `Launch.log`, wherever it runs.
    """

    def offer(self, launch: Launch) -> Offer:
        """Say what starting this would use. Raises BackendError when it cannot be had."""
        ...

    async def start(self, launch: Launch) -> Unit:
        """Start a replica; may take minutes on machines that must be found first."""
        ...

    async def wait(self, unit: Unit) -> Exit:
        """Return once the replica *and all it started* are gone."""
        ...

    async def drain(self, unit: Unit) -> None:
        """Ask it to finish and exit, by the platform's own means if there are any."""
        ...

    async def kill(self, unit: Unit) -> None:
        """End it and all it started, now."""
        ...

    async def orphans(self, known: Collection[Unit]) -> list[Unit]:
        """What still runs of these, and of what an earlier launcher started here unrecorded."""
        ...

    async def end(self, unit: Unit, grace_s: float) -> None:
        """End an orphan: ask, wait for as long as `grace_s`, then kill."""
        ...

    async def clean(self, run_id: str) -> None:
        """Free what a run that has ended left behind."""
        ...
