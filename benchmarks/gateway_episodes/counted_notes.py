"""An MCP server over stdio, of the standard library only: notes in a file of the working folder.

Each `add` is also written to the file that the first argument names, beyond all episodes."""

import json
import sys
from pathlib import Path
from typing import Any

NOTES, LEDGER = Path("notes"), Path(sys.argv[1])
TOOLS = [
    {
        "name": "add",
        "inputSchema": {
            "type": "object",
            "properties": {"note": {"type": "string"}},
            "required": ["note"],
        },
    },
    {"name": "read", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
]


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        server = {"name": "notes", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method != "tools/call":
        return {}
    if params["name"] == "add":
        for path in (NOTES, LEDGER):
            with path.open("a") as file:
                file.write(params["arguments"]["note"] + "\n")
    text = NOTES.read_text() if NOTES.exists() else ""
    return {"content": [{"type": "text", "text": text}]}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            result = answer(asked["method"], asked.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
