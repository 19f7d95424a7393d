"""An MCP server over stdio that says what no server should: by argument, after its handshake."""

import json
import os
import sys
from typing import Any


def say(message: Any) -> None:
    print(json.dumps(message), flush=True)


def answer(request: dict[str, Any], how: str) -> None:
    if request["method"] == "initialize":
        say({"jsonrpc": "2.0", "id": request["id"], "result": {"serverInfo": {"pid": os.getpid()}}})
    elif request["method"] == "tools/list" and how == "endless":
        tool = {"name": "t", "inputSchema": {"type": "object"}}
        say({"jsonrpc": "2.0", "id": request["id"], "result": {"tools": [tool], "nextCursor": "x"}})
    elif request["method"] == "tools/list":
        say({"jsonrpc": "2.0", "id": request["id"], "result": {"tools": None}})
    elif how == "nested":
        print("[" * 100_000, flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            answer(request, sys.argv[1])
