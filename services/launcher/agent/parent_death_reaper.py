"""Ends what a watcher leaves when it is killed: a process that does nothing else."""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def guarded(clean: Callable[[], None]) -> Generator[None]:
    """Have `clean` called in another process once the block, or this whole process, has ended.

    Forks: to be entered before there are threads or an event loop.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        _guard(reader, clean)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def _guard(reader: int, clean: Callable[[], None]) -> NoReturn:
    """Signals for the watcher's whole session are none of its business."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        # Nobody writes: this returns when the last writer is gone.
        os.read(reader, 1)
        clean()
    finally:
        # Not through the interpreter's exit, which would run the watcher's.
        os._exit(0)
