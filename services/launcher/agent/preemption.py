"""Notices that the machine is taken away, from several sources."""

from collections.abc import Sequence
from pathlib import Path

from services.launcher.agent.ports import Notices

# What is left after a notice that says no time, a hook's file or a scheduler's SIGTERM: a little
# less than the 30 s that both Slurm (KillWait) and Kubernetes leave by default before they kill.
UNTOLD_LEFT_S = 25.0


class FileNotices:
    """A file that a scheduler's hook or an operator makes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def notice(self) -> float | None:
        """See `ports.Notices`."""
        return UNTOLD_LEFT_S if self._path.exists() else None


class AnyNotices:
    """The first of several sources that has one."""

    def __init__(self, sources: Sequence[Notices]) -> None:
        self._sources = sources

    async def notice(self) -> float | None:
        """See `ports.Notices`."""
        for source in self._sources:
            left_s = await source.notice()
            if left_s is not None:
                return left_s
        return None
