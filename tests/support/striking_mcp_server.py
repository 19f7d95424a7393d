"""An MCP server over stdio for tests of killed commands: the call of `work` whose number is in the
file `strike_at` of its folder kills the process in the file `victim`."""

import os
import signal
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("strikes")
folder = Path(sys.argv[1])


@server.tool()
def work() -> str:
    """Does some work."""
    with (folder / "worked").open("a") as file:
        file.write("x")
        done = file.tell()
    if str(done) == (folder / "strike_at").read_text():
        os.kill(int((folder / "victim").read_text()), signal.SIGKILL)
    return "worked"


@server.tool()
def process_id() -> int:
    """The number of this process, which no other instance has."""
    return os.getpid()


if __name__ == "__main__":
    server.run("stdio")
