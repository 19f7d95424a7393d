"""Memory of a process."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_PEAK = "VmHWM:"


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had at once.

    Not by getrusage where Linux says it: a process that was started by a larger one inherits
    that one's peak."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(_PEAK):
                return int(line.removeprefix(_PEAK).split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
