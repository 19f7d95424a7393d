"""A real MCP server over HTTP in the test's own event loop, which sees who calls it at once."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from mcp.server import MCPServer
from mcp_types import ToolAnnotations
from starlette.applications import Starlette
from starlette.types import ASGIApp


class Library:
    """Two tools: `look_up` declares to read only, `lend` does not. `hold` keeps calls back.

    A reader waits until `together` readers are inside; 0 is no wait."""

    def __init__(self, together: int = 0) -> None:
        self.together = together
        self.hold = asyncio.Event()
        self.hold.set()
        self.readers: set[str] = set()
        self.writers: set[str] = set()
        self.most_readers = 0
        self.executed: Counter[str] = Counter()
        self.log: list[str] = []
        # Each writer that was inside together with others.
        self.overlaps: list[str] = []
        self._changed = asyncio.Condition()

    @property
    def inside(self) -> int:
        return len(self.readers) + len(self.writers)

    async def look_up(self, title: str) -> str:
        await self._visit(self.readers, title)
        return f"found {title}"

    async def lend(self, title: str) -> str:
        await self._visit(self.writers, title)
        return f"lent {title}"

    async def _visit(self, room: set[str], title: str) -> None:
        self.executed[title] += 1
        self.log.append(f"+{title}")
        room.add(title)
        if self.writers and self.inside > 1:
            self.overlaps.append(f"{self.readers} {self.writers}")
        self.most_readers = max(self.most_readers, len(self.readers))
        try:
            async with self._changed:
                self._changed.notify_all()
                if room is self.readers and self.together:
                    await self._changed.wait_for(lambda: self.most_readers >= self.together)
            await self.hold.wait()
            # A turn of the loop, in which others could enter.
            await asyncio.sleep(0)
        finally:
            room.remove(title)
            self.log.append(f"-{title}")


@asynccontextmanager
async def serving_library(library: Library, port: int = 0) -> AsyncGenerator[str]:
    """Serve the library; yield its URL without a trailing slash."""
    server = MCPServer("library", log_level="WARNING")
    server.add_tool(library.look_up, annotations=ToolAnnotations(read_only_hint=True))
    server.add_tool(library.lend)
    async with serving_tools(server, port) as url:
        try:
            yield url
        finally:
            library.hold.set()


@asynccontextmanager
async def serving_tools(
    server: MCPServer, port: int = 0, around: Callable[[Starlette], ASGIApp] | None = None
) -> AsyncGenerator[str]:
    """Serve a server's tools over HTTP, `around` which may be another app; yield the URL without a
    trailing slash."""
    listener = socket.create_server(("127.0.0.1", port))
    app = server.streamable_http_app(json_response=True, stateless_http=True)
    serving = _serve(around(app) if around else app, listener)
    task = asyncio.create_task(serving.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        serving.should_exit = True
        await task
        listener.close()


class _Quiet(uvicorn.Server):
    """A server that leaves signals to the runner of the tests."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _serve(app: object, listener: socket.socket) -> uvicorn.Server:
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    return _Quiet(config)
