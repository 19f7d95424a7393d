"""The public server "everything" over HTTP."""

import os
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.rpc.free_ports import free_port
from tests.mcp_servers.public_servers import npm_command

_START_S = 30.0


@dataclass(frozen=True, slots=True)
class HttpKind:
    """A way to serve over HTTP: its path there, `transport` in the settings of the gateway, and
    what the server writes when a session begins and ends."""

    path: str
    transport: str
    begun: str
    ended: str


HTTP_KINDS = {
    "streamableHttp": HttpKind(
        "mcp", "http", "Session initialized", "Received session termination request"
    ),
    "sse": HttpKind("sse", "sse", "Client Connected", "Client Disconnected"),
}


class EverythingServer:
    """A process of the server; started again, it has the same address and has forgotten all."""

    def __init__(self, kind: str, output: Path) -> None:
        self.kind = HTTP_KINDS[kind]
        self._command = npm_command("server-everything", kind)
        self._output = output
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/{self.kind.path}"

    def count_sessions(self) -> tuple[int, int]:
        """Return how many sessions have begun, and how many of them have ended."""
        written = self._output.read_text()
        return written.count(self.kind.begun), written.count(self.kind.ended)

    def start(self) -> None:
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PORT": str(self._port)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + _START_S
        while not self._listens():
            assert self._process.poll() is None and time.monotonic() < until, "it does not serve"
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


@contextmanager
def everything_server(kind: str, folder: Path) -> Generator[EverythingServer]:
    server = EverythingServer(kind, folder / "server.log")
    server.start()
    try:
        yield server
    finally:
        server.kill()
