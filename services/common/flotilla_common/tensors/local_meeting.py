"""Connections between two processes of one user on one machine, over which each signals its
progress.

Every wait has a deadline, even if the other side hangs, and the end of the other side is noticed at
once: a store can do neither in the middle of a call."""

import os
import socket
import struct
import uuid

_TICK = b"."
_CREDENTIALS = struct.Struct("3i")


class LocalConnection:
    """One side of a connection. The other side counts the ticks that it waits for."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        connected.settimeout(timeout_s)

    def tick(self) -> None:
        """Signal one more finished step to the other side. Raises RuntimeError."""
        try:
            self._socket.sendall(_TICK)
        except OSError as error:
            raise RuntimeError(f"the other side is lost: {error}") from error

    def wait_for_tick(self) -> None:
        """Wait until the other side has signalled one more step. Raises RuntimeError."""
        try:
            came = self._socket.recv(1)
        except OSError as error:
            raise RuntimeError(f"the other side is lost: {error}") from error
        if came != _TICK:
            raise RuntimeError("the other side is lost: it has ended")

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._socket.close()


class LocalMeeting:
    """A socket at which one process waits for another; it leaves no file."""

    def __init__(self) -> None:
        self.name = f"flotilla-{uuid.uuid4()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(1)

    def accept(self, timeout_s: float) -> LocalConnection:
        """Wait for a peer of the same user. Raises RuntimeError."""
        self._listener.settimeout(timeout_s)
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            raise RuntimeError(f"the other side has not connected: {error}") from error
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            connected.close()
            raise RuntimeError(f"user {user} connected to a meeting of user {os.geteuid()}")
        return LocalConnection(connected, timeout_s)

    def close(self) -> None:
        """Stop accepting connections."""
        self._listener.close()


def meet(name: str, timeout_s: float) -> LocalConnection:
    """Connect to the process that waits at the meeting `name`. Raises RuntimeError."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connecting.settimeout(timeout_s)
        connecting.connect(_address(name))
    except OSError as error:
        connecting.close()
        raise RuntimeError(f"no process waits at {name}: {error}") from error
    return LocalConnection(connecting, timeout_s)


def _address(name: str) -> str:
    # One of Linux's abstract socket names, which are not files.
    return f"\0{name}"
