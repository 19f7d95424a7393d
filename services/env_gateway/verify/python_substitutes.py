"""Ways for Python to do in the sandbox what it usually does by files and sockets."""

import os
import sqlite3
from typing import Any


class _PipeEnd:
    """One end of a pipe, as an event loop uses a socket to wake itself."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def recv(self, size: int) -> bytes:
        return os.read(self._descriptor, size)

    def send(self, data: bytes) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        os.close(self._descriptor)


def sort_in_memory() -> None:
    """Have databases sort in memory: SQLite would write what is large to files, of which there are
    none."""
    connect = sqlite3.connect

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    sqlite3.connect = connected


def wake_loops_by_pipes() -> None:
    """Event loops wake themselves by a pair of sockets, which hold more of the kernel's memory than
    a verifier may have."""
    # Only here, since to import it takes as long as to start.
    from asyncio.selector_events import BaseSelectorEventLoop

    loops: Any = BaseSelectorEventLoop
    loops._make_self_pipe = _make_self_pipe


def _make_self_pipe(loop: Any) -> None:
    reader, writer = os.pipe()
    loop._ssock, loop._csock = _PipeEnd(reader), _PipeEnd(writer)
    loop._internal_fds += 1
    loop._add_reader(reader, loop._read_from_self)
