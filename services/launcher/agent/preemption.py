"""Preemption notices from several sources."""

from collections.abc import Sequence
from pathlib import Path

from services.launcher.agent.ports import PreemptionNotices

# What is left after a notice that says no time, a hook's file or a scheduler's SIGTERM: a little
# less than the 30 s that both Slurm (KillWait) and Kubernetes leave by default before they kill.
UNTOLD_LEFT_S = 25.0


class FileNotices:
    """Notices by a file that a scheduler's hook or an operator creates."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def poll_notice(self) -> float | None:
        """Look for the file. See `ports.PreemptionNotices`."""
        return UNTOLD_LEFT_S if self._path.exists() else None


class AnyNotices:
    """The first notice that any of several sources has."""

    def __init__(self, sources: Sequence[PreemptionNotices]) -> None:
        self._sources = sources

    async def poll_notice(self) -> float | None:
        """Ask the sources in order. See `ports.PreemptionNotices`."""
        for source in self._sources:
            left_s = await source.poll_notice()
            if left_s is not None:
                return left_s
        return None
