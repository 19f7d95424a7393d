"""An MCP server whose tools change while it runs, over stdio or over HTTP at a port. Its tools
answer its name and their own; `deploy` replaces all others."""

import sys
from collections.abc import Sequence

from mcp.server.mcpserver import Context, MCPServer

own, port, *first = sys.argv[1:]
server = MCPServer(own)
offered: list[str] = []


def offer(names: Sequence[str]) -> None:
    for name in offered:
        server.remove_tool(name)
    offered[:] = names
    for name in names:
        server.add_tool(lambda name=name: f"{own}.{name}", name=name, description=f"Is {name}.")


@server.tool()
async def deploy(tools: list[str], announced: bool, ctx: Context) -> str:
    """Offer these tools from now on."""
    offer(tools)
    if announced:
        await ctx.session.send_tool_list_changed()
    return "deployed"


offer(first)
if port == "stdio":
    server.run("stdio")
else:
    server.run("streamable-http", host="127.0.0.1", port=int(port))
