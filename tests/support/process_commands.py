"""Commands of processes that may end while they are read."""

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's arguments; none of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def rank_pids() -> list[int]:
    """Return the ranks that this process has started, the oldest first."""
    children = sorted(
        psutil.Process().children(), key=lambda child: (child.create_time(), child.pid)
    )
    return [child.pid for child in children if "flotilla_learner.rank" in command_of(child)]
