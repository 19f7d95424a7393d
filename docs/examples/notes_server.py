"""An MCP server of one's own over stdio: a notebook, for docs/examples/notes.toml.

Each episode gets a process, which finds the task's data key in its environment.
"""

import json
import os

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("notes")
notes = [f"call {os.environ['FLOTILLA_DATA_KEY']}"]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_notes() -> str:
    """All notes, oldest first."""
    return json.dumps(notes)


@server.tool()
def add_note(text: str) -> int:
    """Write a note; the answer is how many there are."""
    notes.append(text)
    return len(notes)


if __name__ == "__main__":
    server.run("stdio")
