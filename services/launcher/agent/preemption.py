"""Preemption notices by a file, and the time that they leave."""

import asyncio
from pathlib import Path

from services.launcher.agent.ports import PollNotice

# Time left after a notice without a time (a hook's file, a scheduler's SIGTERM): a little less than
# the 30 s before Slurm (KillWait) and Kubernetes kill by default.
DEFAULT_LEFT_S = 25.0


def poll_file(path: Path) -> PollNotice:
    """Return the poll of a file that a scheduler's hook or an operator creates."""

    async def poll() -> float | None:
        return DEFAULT_LEFT_S if await asyncio.to_thread(path.exists) else None

    return poll
