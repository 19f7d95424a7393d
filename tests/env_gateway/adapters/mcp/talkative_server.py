"""An MCP server over stdio that breaks the protocol after its handshake in a given way."""

import json
import os
import sys
from typing import Any


def send(message: Any) -> None:
    print(json.dumps(message), flush=True)


def answer(request: dict[str, Any], how: str) -> None:
    if request["method"] == "initialize":
        send(
            {"jsonrpc": "2.0", "id": request["id"], "result": {"serverInfo": {"pid": os.getpid()}}}
        )
    elif request["method"] == "tools/list" and how == "endless":
        tool = {"name": "t", "inputSchema": {"type": "object"}}
        send(
            {"jsonrpc": "2.0", "id": request["id"], "result": {"tools": [tool], "nextCursor": "x"}}
        )
    elif request["method"] == "tools/list":
        send({"jsonrpc": "2.0", "id": request["id"], "result": {"tools": None}})
    elif how == "nested":
        print("[" * 100_000, flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            answer(request, sys.argv[1])
