"""Connections between two processes of one user and one machine, over which each tells the other
how far it is.

Every wait has a deadline, also where the other side stands still, and one that has ended is noticed
at once: a store cannot do either in the middle of a call."""

import os
import socket
import struct
import uuid

_TICK = b"."
_CREDENTIALS = struct.Struct("3i")


class LocalConnection:
    """One side of a connection, whose ticks are counted by those who wait for them."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        connected.settimeout(timeout_s)

    def tick(self) -> None:
        """Tell the other side that something is done. Raises RuntimeError."""
        try:
            self._socket.sendall(_TICK)
        except OSError as error:
            raise RuntimeError(f"the other side is lost: {error}") from error

    def wait_for_tick(self) -> None:
        """Wait until the other side has told of one more. Raises RuntimeError."""
        try:
            came = self._socket.recv(1)
        except OSError as error:
            raise RuntimeError(f"the other side is lost: {error}") from error
        if came != _TICK:
            raise RuntimeError("the other side is lost: it has ended")

    def close(self) -> None:
        """End the connection. May be called again."""
        self._socket.close()


class LocalMeeting:
    """A place where one process waits for another; no file is left of it."""

    def __init__(self) -> None:
        self.name = f"flotilla-{uuid.uuid4()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_address(self.name))
        self._listener.listen(1)

    def accept(self, timeout_s: float) -> LocalConnection:
        """Wait for the other, of the same user. Raises RuntimeError."""
        self._listener.settimeout(timeout_s)
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            raise RuntimeError(f"the other side has not come: {error}") from error
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            connected.close()
            raise RuntimeError(f"user {user} came to a meeting of user {os.geteuid()}")
        return LocalConnection(connected, timeout_s)

    def close(self) -> None:
        """Wait for nobody any more."""
        self._listener.close()


def meet(name: str, timeout_s: float) -> LocalConnection:
    """Connect to who waits at the meeting `name`. Raises RuntimeError."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connecting.settimeout(timeout_s)
        connecting.connect(_address(name))
    except OSError as error:
        connecting.close()
        raise RuntimeError(f"nobody is at {name}: {error}") from error
    return LocalConnection(connecting, timeout_s)


def _address(name: str) -> str:
    # Of Linux's abstract names, which are no files.
    return f"\0{name}"
