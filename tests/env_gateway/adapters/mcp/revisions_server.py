"""An MCP server over HTTP with one cart, at a port. It speaks the revisions with a handshake
("old"), the one without ("new"), or "both", and writes to a file what it is asked."""

import json
import sys
from pathlib import Path

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.types import Message, Receive, Scope, Send

NEW = "2026-07-28"
speaks, port, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
server = MCPServer("shop")
served = server.streamable_http_app(stateless_http=True)
cart: list[str] = []


def note(line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


@server.tool()
def add() -> str:
    """Put an item into the cart."""
    cart.append("item")
    return f"{len(cart)} items"


@server.tool()
async def wait() -> str:
    """Wait for longer than anybody does."""
    note("waiting")
    try:
        await anyio.sleep(60.0)
    except anyio.get_cancelled_exc_class():
        note("cancelled")
        raise
    return "waited"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Note a request, and refuse it if it is of the other revision."""
    if scope["type"] != "http":
        await served(scope, receive, send)
        return
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    version = headers.get("mcp-protocol-version")
    first = await receive()
    message = json.loads(first["body"] or "{}")
    note(message.get("method", scope["method"]))
    if speaks == "both" or (version == NEW) == (speaks == "new"):
        await served(scope, _with_first(first, receive), send)
        return
    data = {"supported": [NEW], "requested": version or "2025-11-25"}
    error = {"code": -32022, "message": "Unsupported protocol version", "data": data}
    if speaks == "old":
        error = {"code": -32000, "message": "Bad Request: Server not initialized"}
    named = message.get("id") if speaks == "new" else None
    body = json.dumps({"jsonrpc": "2.0", "id": named, "error": error}).encode()
    content = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": content})
    await send({"type": "http.response.body", "body": body})


def _with_first(first: Message, receive: Receive) -> Receive:
    waiting = [first]

    async def receive_next() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_next


uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
