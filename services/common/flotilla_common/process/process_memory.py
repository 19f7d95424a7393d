"""Memory of a process."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PEAK = "VmHWM:"


def peak_memory_bytes() -> int:
    """Return the peak memory of this process.

    Linux reports it in /proc; getrusage is the fallback, because a process started by a larger one
    inherits that one's peak there."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(_PEAK):
                return int(line.removeprefix(_PEAK).split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
