"""An MCP server over stdio that speaks in a given unusual way after its handshake. Tool `t` answers
"done"."""

import json
import sys
from collections.abc import Mapping
from typing import Any

INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "serverInfo": {"name": "talkative", "version": "1"},
}
TOOL = {"name": "t", "inputSchema": {"type": "object"}}
DONE = {"content": [{"type": "text", "text": "done"}]}
# Written for ever.
FLOODS = {
    "newlines": "\n" * 2**16,
    "braces": "{\n" * 2**15,
    "names": "{\n{" + '"jsonrpc"' * 50_000 + "\n}}\n",
}
LARGE = {"content": [{"type": "text", "text": "x" * 100_000}]}


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def send(request: Mapping[str, Any], result: object, *, id_last: bool = False) -> None:
    ends = {"jsonrpc": "2.0", "id": request["id"]}
    write(json.dumps({"result": result, **ends} if id_last else {**ends, "result": result}) + "\n")


def answer_call(request: Mapping[str, Any], how: str) -> None:
    name = request["params"]["name"]
    while name == "flood":
        write(FLOODS[how])
    if how == "newlines":
        write("\n" * 2**20)
    elif how == "noise":
        write('starting {"a": up\n{ not json\n[1, 2]\n{"level": "info"}\n')
    elif how == "pretty":
        write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": DONE}, indent=2) + "\n")
        return
    elif how == "nested" and name == "large":
        write(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {"[" * 100_000}\n')
        write("]" * 100_000 + "}\n")
    elif how in ("id first", "id last") and name == "large":
        return send(request, LARGE, id_last=how == "id last")
    elif how == "ping":
        write(json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"}) + "\n")
        assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": "p", "result": {}}
    send(request, DONE)


def answer(request: Mapping[str, Any], how: str) -> None:
    if request["method"] == "initialize":
        send(request, INITIALIZED)
    elif request["method"] == "tools/list":
        cursor = request.get("params", {}).get("cursor", 0)
        pages = {"endless": {"tools": [], "nextCursor": str(int(cursor) + 1)}}
        send(request, pages.get(how, {"tools": None if how == "none" else [TOOL]}))
    elif request["method"] == "tools/call":
        answer_call(request, how)
    else:
        send(request, {})


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            answer(request, sys.argv[1])
