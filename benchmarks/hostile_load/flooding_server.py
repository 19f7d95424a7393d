"""An MCP server over stdio for `benchmarks.hostile_load`: `... STREAM TEXT`. A call of its tool is
never answered: it writes TEXT to STREAM, without an end."""

import json
import os
import sys
from typing import Any

BLOCK_BYTES = 2**16
TOOL = {"name": "flood", "inputSchema": {"type": "object"}}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["method"] == "initialize":
        return {
            "protocolVersion": request["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "flooding", "version": "1"},
        }
    return {"tools": [TOOL]} if request["method"] == "tools/list" else {}


def flood(stream: str, text: str) -> None:
    block = text.encode() * (BLOCK_BYTES // len(text))
    while True:
        os.write({"stdout": 1, "stderr": 2}[stream], block)


def main(stream: str, text: str) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if request["method"] == "tools/call":
            flood(stream, text)
        if "id" in request:
            message = {"jsonrpc": "2.0", "id": request["id"], "result": answer(request)}
            print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
