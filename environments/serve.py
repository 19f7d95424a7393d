"""Serve the environments over HTTP.

    python -m environments.serve --port 0

Prints one line of JSON, {"url": "http://127.0.0.1:PORT"}, once it serves. It speaks Fleet's
instance wire (POST /v1/env/instances with env_key and data_key creates an instance) and MCP at
{root}mcp, where root is the instance's `urls.root`. SIGTERM closes every instance and exits with 0.
"""

import argparse
import asyncio
import json
import os
import select
import socket
import stat
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn

from environments.scenario import APPS
from environments.server.app import build_app
from environments.server.registry import Registry

TOKEN_VARIABLE = "FLOTILLA_ENV_TOKEN"
GRACE_SECONDS = 5
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
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
        # Not recorded as captured: uvicorn would raise it again and the exit status be a failure.
        self.force_exit = self.should_exit
        self.should_exit = True


def _stdin_closed() -> bool:
    """Whether standard input is a pipe whose other end has gone."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return False
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


async def _exit_with_parent(server: uvicorn.Server, parent: int) -> None:
    # Nothing wakes a process whose parent has died, so this has to look.
    while os.getppid() == parent and not _stdin_closed():  # noqa: ASYNC110
        await asyncio.sleep(_PARENT_CHECK_SECONDS)
    server.should_exit = True


async def _serve(options: argparse.Namespace, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    authority = f"[{host}]" if ":" in host else host
    app = build_app(
        Registry(options.max_instances),
        tuple(options.env or APPS),
        hosts=[*_LOOPBACK, "[::1]"],
        token=os.environ.get(TOKEN_VARIABLE),
    )
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = _Server(config, f"http://{authority}:{port}")
    watcher = None
    if options.die_with_parent:
        watcher = asyncio.create_task(_exit_with_parent(server, options.parent))
    await server.serve([listener])
    if watcher is not None:
        watcher.cancel()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio turns Nagle's delays of 40 ms off only where it reads this number.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m environments.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"With {TOKEN_VARIABLE} in the environment, every request must bring it as "
        "'Authorization: Bearer TOKEN'.",
    )
    parser.add_argument("--host", default="127.0.0.1", choices=_LOOPBACK)
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one (default)")
    parser.add_argument(
        "--env",
        action="append",
        choices=list(APPS),
        help="environment to serve; may be repeated (default: all)",
    )
    parser.add_argument(
        "--max-instances", type=int, default=4096, help="instances at once (default 4096)"
    )
    parser.add_argument(
        "--die-with-parent",
        action="store_true",
        help="exit when the parent process ends or the pipe that is standard input closes",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    parent = os.getppid()
    options = parser.parse_args(argv, argparse.Namespace(parent=parent))
    if options.max_instances < 1:
        parser.error("--max-instances must be at least 1")
    try:
        listener = _listener(options.host, options.port)
    except (OSError, OverflowError) as error:
        print(f"error: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    asyncio.run(_serve(options, listener))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
