"""An MCP server over stdio with one tool, which takes as many seconds as its argument, and answers
with the number of its process."""

import json
import os
import sys
import time
from typing import Any

TOOL = {
    "name": "nap",
    "inputSchema": {"type": "object", "properties": {"seconds": {"type": "number"}}},
}


def result(request: dict[str, Any]) -> dict[str, Any]:
    if request["method"] == "tools/list":
        return {"tools": [TOOL]}
    if request["method"] == "tools/call":
        time.sleep(request["params"]["arguments"]["seconds"])
        return {"content": [{"type": "text", "text": str(os.getpid())}]}
    return {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "serverInfo": {"name": "napping", "version": "1"},
    }


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            answer = {"jsonrpc": "2.0", "id": request["id"], "result": result(request)}
            print(json.dumps(answer), flush=True)
