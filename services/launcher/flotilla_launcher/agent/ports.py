"""Ports of the watcher: the launcher and preemption notices."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from flotilla_launcher.agent_protocol import ReplicaCommand, UnitReport


class LauncherAwayError(Exception):
    """The launcher does not answer, or does not know this run at present."""


class ReplicaReplacedError(Exception):
    """Another machine has taken over this replica."""


@dataclass(frozen=True, slots=True)
class LauncherAnswer:
    """The launcher's command, and the new lease of the replica (0: as before).

    `begun`: the run has trained and must never start over."""

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


# Return the seconds that are left before the machine is taken away; None without a notice. Polled
# every few seconds.
PollNotice = Callable[[], Awaitable[float | None]]
