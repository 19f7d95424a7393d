"""The time for which one callback holds an event loop, in CPU time of its thread: what else runs on
the machine counts for nothing, nor does the search for garbage, which is mostly that of the
tests."""

import asyncio
import gc
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MOST_S = 0.05


@dataclass(slots=True)
class Held:
    """The longest callback since `begin`, of every thread but those left out."""

    longest_s: float = 0.0
    what: str = ""
    _collecting: threading.local = field(default_factory=threading.local)

    def begin(self) -> None:
        self.longest_s, self.what = 0.0, ""

    def within(self) -> bool:
        """Return True if no loop was held for longer than allowed."""
        return self.longest_s < MOST_S

    def check(self) -> None:
        """Fail if a loop was held too long."""
        assert self.within(), f"{self.longest_s * 1000:.0f} ms in {self.what}"

    def took(self, seconds: float, handle: Any) -> None:
        if seconds > self.longest_s:
            self.longest_s, self.what = seconds, repr(handle)[:500]

    def collected_s(self) -> float:
        """Return how long this thread has searched for garbage so far."""
        return getattr(self._collecting, "total_s", 0.0)

    def collecting(self, phase: str, _: dict[str, int]) -> None:
        """Called by the garbage collector, in the thread that it interrupts."""
        now = time.thread_time()
        if phase == "start":
            self._collecting.since = now
        else:
            self._collecting.total_s = self.collected_s() + now - self._collecting.since


@contextmanager
def held_loops(*left_out: threading.Thread) -> Generator[Held]:
    """Watch each callback of the loops of this process."""
    held = Held()
    others = {thread.ident for thread in left_out}
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        if threading.get_ident() in others:
            run(self)
            return
        began = time.thread_time() - held.collected_s()
        run(self)
        held.took(time.thread_time() - held.collected_s() - began, self)

    asyncio.Handle._run = timed
    gc.callbacks.append(held.collecting)
    try:
        yield held
    finally:
        gc.callbacks.remove(held.collecting)
        asyncio.Handle._run = run
