"""Replacements in the sandbox for Python's usual files and sockets."""

import os
import sqlite3
from typing import Any


class _PipeEnd:
    """One end of a pipe, in place of the socket that wakes an event loop."""

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
    """Make databases sort in memory: SQLite would write large sorts to files, which the sandbox
    forbids."""
    connect = sqlite3.connect

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    sqlite3.connect = connected


def wake_loops_by_pipes() -> None:
    """Make event loops wake themselves by pipes: the usual pair of sockets takes more kernel memory
    than a verifier may use."""
    # Imported only here, because the import takes as long as the start.
    from asyncio.selector_events import BaseSelectorEventLoop

    loops: Any = BaseSelectorEventLoop
    loops._make_self_pipe = _make_self_pipe


def _make_self_pipe(loop: Any) -> None:
    reader, writer = os.pipe()
    loop._ssock, loop._csock = _PipeEnd(reader), _PipeEnd(writer)
    loop._internal_fds += 1
    loop._add_reader(reader, loop._read_from_self)
