"""Preemption notices from several sources."""

from collections.abc import Sequence
from pathlib import Path

from services.launcher.agent.ports import PreemptionNotices

# Time left after a notice without a time (a hook's file, a scheduler's SIGTERM): a little less than
# the 30 s before Slurm (KillWait) and Kubernetes kill by default.
DEFAULT_LEFT_S = 25.0


class FileNotices:
    """Notices by a file that a scheduler's hook or an operator creates."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def poll_notice(self) -> float | None:
        """Look for the file. See `ports.PreemptionNotices`."""
        return DEFAULT_LEFT_S if self._path.exists() else None


class AnyNotices:
    """The first notice that any of several sources has."""

    def __init__(self, sources: Sequence[PreemptionNotices]) -> None:
        self._sources = sources

    async def poll_notice(self) -> float | None:
        """Poll the sources in order. See `ports.PreemptionNotices`."""
        for source in self._sources:
            left_s = await source.poll_notice()
            if left_s is not None:
                return left_s
        return None
