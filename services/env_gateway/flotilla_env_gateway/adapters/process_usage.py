"""What processes use, by Linux's accounts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """CPU seconds so far, and the memory that is resident and not shared."""

    cpu_s: float
    memory_bytes: int


def measure_usage(pids: Sequence[int]) -> Usage:
    """Measure processes with all their descendants, those included that were waited for; what ends
    meanwhile counts as nothing."""
    ticks = pages = 0
    left = list(pids)
    while left:
        process = Path("/proc") / str(left.pop())
        try:
            _, resident, shared, *_ = (process / "statm").read_text().split()
            # The name, in parentheses, may have any character.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            for thread in (process / "task").iterdir():
                left += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
        pages += int(resident) - int(shared)
        ticks += sum(map(int, fields[11:15]))
    return Usage(ticks / _TICKS_PER_S, pages * _PAGE_BYTES)
