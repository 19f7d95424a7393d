"""An MCP server of one's own: two tools over a small stock, for docs/examples/stock.toml."""

import json

from mcp.server import MCPServer

PRICES = {"potato": 3, "sofa": 40, "shelf": 17, "lamp": 12}
server = MCPServer("stock")


@server.tool()
def find_item(item: str) -> str:
    """Find an item and its price."""
    return json.dumps([{"item": item, "price": PRICES[item]}] if item in PRICES else [])


@server.tool()
def list_items() -> str:
    """List the names of all items."""
    return json.dumps(sorted(PRICES))


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=8765)
