"""Commands of processes that may end while they are looked at."""

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's arguments; none of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
