"""ASGI application as a process that others can supervise."""

import asyncio
import gc
import json
import os
import select
import socket
import stat
from argparse import ArgumentParser
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOST_HEADERS = (*LOOPBACK, "[::1]")
TOKEN_VARIABLE = "FLOTILLA_ENV_TOKEN"
GRACE_SECONDS = 5
_PARENT_CHECK_SECONDS = 0.25


class _Server(uvicorn.Server):
    """Announces its address, and treats a signal as the normal way to end."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(json.dumps({"url": self._url}), flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not recorded as captured: uvicorn would raise it again, and the exit status would fail.
        self.force_exit = self.should_exit
        self.should_exit = True


def add_options(parser: ArgumentParser) -> None:
    """Add the options of every server: its address, and when it exits on its own."""
    parser.add_argument("--host", default="127.0.0.1", choices=LOOPBACK)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one (default)")
    parser.add_argument(
        "--die-with-parent",
        action="store_true",
        help="exit when the parent process ends or the pipe that is standard input closes",
    )


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises `OSError` or `OverflowError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio turns Nagle's delays of 40 ms off only where it reads this number.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve_app(app: ASGIApp, listener: socket.socket, *, parent: int | None) -> None:
    """Serve until a signal, or until the process `parent` is no longer this one's parent.

    Prints {"url": ...} once it serves.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    # A request's objects are many and in no cycle: searching them takes a tenth of the time with
    # Python's 700.
    gc.set_threshold(50_000)
    server = _Server(config, url_of(listener))
    watcher = None
    if parent is not None:
        watcher = asyncio.create_task(_exit_with_parent(server, parent))
    await server.serve([listener])
    if watcher is not None:
        watcher.cancel()


def _stdin_closed() -> bool:
    """Return True when standard input is a pipe whose other end has gone."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return False
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


async def _exit_with_parent(server: uvicorn.Server, parent: int) -> None:
    # A process is not notified of its parent's death, so this polls.
    while os.getppid() == parent and not _stdin_closed():  # noqa: ASYNC110
        await asyncio.sleep(_PARENT_CHECK_SECONDS)
    server.should_exit = True
