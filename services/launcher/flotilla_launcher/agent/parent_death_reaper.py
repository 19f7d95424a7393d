"""Reaper of a killed watcher's leftovers: a process that does nothing else."""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def cleaned_up_after_death(clean: Callable[[], None]) -> Generator[None]:
    """Have `clean` called in another process once the block, or this whole process, has ended.

    Forks: enter it before there are threads or an event loop."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        _clean_after_death(reader, clean)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def _clean_after_death(reader: int, clean: Callable[[], None]) -> NoReturn:
    """Wait until the parent is gone, then clean up.

    Ignores the signals meant for the watcher's whole session."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        # Nothing is written: the read returns when the last writer is gone.
        os.read(reader, 1)
        clean()
    finally:
        # Not through the interpreter's exit, which would run the watcher's.
        os._exit(0)
