"""An MCP server over stdio for tests of killed commands: the call of `work` whose number is in the
file `block_at` of its folder never ends."""

import secrets
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("blocking")
folder = Path(sys.argv[1])


@server.tool()
def work() -> str:
    """Does some work."""
    with (folder / "worked").open("a") as file:
        file.write("x")
        done = file.tell()
    while str(done) == (folder / "block_at").read_text():
        time.sleep(0.1)
    return "worked"


@server.tool()
def draw_number() -> str:
    """A number that no other instance draws."""
    return secrets.token_hex(8)


if __name__ == "__main__":
    server.run("stdio")
