"""Ports of the watcher: the launcher, preemption notices and processes."""

from dataclasses import dataclass
from typing import Protocol

from services.launcher.agent_protocol import ReplicaCommand, UnitReport
from services.launcher.backends.ports import LaunchSpec
from services.launcher.state import ExitStatus, Unit


class LauncherAwayError(Exception):
    """No answer from the launcher, or it does not know this run now; it may again later."""


class ReplicaReplacedError(Exception):
    """Another machine runs this replica by now."""


@dataclass(frozen=True, slots=True)
class LauncherAnswer:
    """The launcher's command, and how long it lets the replica continue (0: as before).

    `begun`: the run has trained, and must never begin anew."""

    command: ReplicaCommand
    lease_s: float
    begun: bool


class LauncherLink(Protocol):
    """The launcher as the watcher sees it. Both methods raise LauncherAwayError."""

    async def report_unit(self, report: UnitReport, timeout_s: float) -> LauncherAnswer:
        """Report the replica's state. Raises ReplicaReplacedError."""
        ...

    async def push_log(
        self, incarnation: str, position: int, chunk: bytes, beside: str = ""
    ) -> int:
        """Append to the replica's log, or to the one of that name beside it. Return the
        position to continue from."""
        ...


class PreemptionNotices(Protocol):
    """Source of notices that the machine is about to be taken away."""

    async def poll_notice(self) -> float | None:
        """Return the seconds that are left; None without a notice. May be asked every few
        seconds."""
        ...


class Processes(Protocol):
    """Processes of the replica on this machine. A part of `backends.ports.Backend`; see there."""

    async def start_replica(self, launch: LaunchSpec) -> Unit: ...

    async def wait_for_exit(self, unit: Unit) -> ExitStatus: ...

    async def drain_replica(self, unit: Unit) -> None: ...

    async def kill_replica(self, unit: Unit) -> None: ...
