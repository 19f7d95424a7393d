"""What the watcher needs from others, in its own words."""

from dataclasses import dataclass
from typing import Protocol

from services.launcher.control.supervisor import Command
from services.launcher.ports import Launch, UnitReport
from services.launcher.state import Exit, Unit


class LauncherAwayError(Exception):
    """The launcher did not answer, or does not know this run now; it may again later."""


class ReplacedError(Exception):
    """Another machine has this replica by now."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the launcher wants, and how long it lets the replica go on (0: as before).

    `begun`: the run has trained, and must never begin anew.
    """

    command: Command
    lease_s: float
    begun: bool


class Launcher(Protocol):
    """The launcher as the watcher sees it. Both methods raise LauncherAwayError."""

    async def report(self, report: UnitReport, timeout_s: float) -> Answer:
        """Say how the replica is. Raises ReplacedError."""
        ...

    async def push(self, incarnation: str, position: int, chunk: bytes, beside: str = "") -> int:
        """Append to the replica's log, or to the one of that name beside it; returns where to go
        on."""
        ...


class Notices(Protocol):
    """Tells that the machine is about to be taken away."""

    async def notice(self) -> float | None:
        """Seconds that are left; None if nothing was said. May be asked every few seconds."""
        ...


class Processes(Protocol):
    """Runs the replica here. A part of `launcher.ports.Backend`; see there."""

    async def start(self, launch: Launch) -> Unit: ...

    async def wait(self, unit: Unit) -> Exit: ...

    async def drain(self, unit: Unit) -> None: ...

    async def kill(self, unit: Unit) -> None: ...
