"""An MCP server over stdio for tests, with the official SDK: notes that only this process has."""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("notes")
notes: list[str] = [os.environ["FLOTILLA_DATA_KEY"]]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_notes() -> list[str]:
    """All notes, oldest first."""
    return notes


@server.tool()
def add_note(text: str) -> int:
    """Write a note; the answer is how many there are."""
    notes.append(text)
    return len(notes)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("no ink")


@server.tool()
def sleep(seconds: float) -> str:
    """Blocks."""
    time.sleep(seconds)
    return "awake"


both = asyncio.Barrier(2)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def meet() -> str:
    """Waits for another call of this tool."""
    await both.wait()
    return "met"


@server.tool()
def crash() -> str:
    """Ends the whole process."""
    os._exit(3)


@server.tool()
def process_id() -> int:
    """The number of this process."""
    return os.getpid()


if __name__ == "__main__":
    print("a log line on standard output, as careless servers write", flush=True)
    print("and one where it belongs", file=sys.stderr)
    server.run("stdio")
