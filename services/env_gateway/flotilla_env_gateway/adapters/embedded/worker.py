"""Worker process of embedded environments: one JSON request per line, one answer each, preceded by
one line when it is ready.

Its standard input and output are pipes, and it ends with the input. An app finishes a request
before the next one is read, so a process hosts many instances without a lock."""

import base64
import json
import sqlite3
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from flotilla_common.process.parent_channel import ParentChannel
from flotilla_common.text.printable_text import print_visible
from flotilla_environments import api

# With the line feed, this is the most that the gateway reads of one answer.
MAX_ANSWER_BYTES = 64 * 2**20

Message = dict[str, Any]


class InstanceHost:
    """Instances by their id, and the gateway's operations on each."""

    def __init__(self) -> None:
        self._instances: dict[str, api.Instance] = {}
        self._operations: Mapping[str, Callable[[Message], Message]] = {
            "open": self._open_instance,
            "tools": self._list_tools,
            "call": self._call_tool,
            "query": self._query_database,
            "snapshot": self._snapshot_database,
            "close": self._close_instance,
            "instances": lambda _: {"instances": list(self._instances)},
        }

    def answer_request(self, line: bytes) -> Message:
        try:
            request = json.loads(line)
            return self._operations[request["op"]](request)
        except Exception as error:  # noqa: BLE001
            # A fault of the app. It is reported, and the other instances continue.
            print_visible(traceback.format_exc(), end="", file=sys.stderr)
            return {"fault": repr(error)[:500]}

    def _open_instance(self, request: Message) -> Message:
        if request["instance"] not in self._instances:
            try:
                instance = api.open_instance(
                    request["env_key"], request["data_id"], request["data_version"]
                )
            except ValueError as error:
                return {"refused": str(error)}
            self._instances[request["instance"]] = instance
        return {}

    def _list_tools(self, request: Message) -> Message:
        tools = self._instances[request["instance"]].tools()
        return {
            "tools": [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema_json": json.dumps(tool.parameters),
                    "read_only": tool.read_only,
                    "idempotent": tool.idempotent,
                }
                for tool in tools
            ]
        }

    def _call_tool(self, request: Message) -> Message:
        try:
            value = self._instances[request["instance"]].call(request["name"], request["arguments"])
        except api.ToolError as error:
            return {"refused": str(error)}
        if isinstance(value, api.Picture):
            return {"png": value.png}
        return {"text": json.dumps(value)}

    def _query_database(self, request: Message) -> Message:
        args = [decode_value(value) for value in request["args"]]
        try:
            rows = self._instances[request["instance"]].query(request["db"], request["sql"], args)
        except sqlite3.Error as error:
            return {"refused": str(error)}
        return {"columns": rows.columns, "rows": rows.rows}

    def _snapshot_database(self, request: Message) -> Message:
        content = self._instances[request["instance"]].snapshot(request["db"])
        return {"content": content}

    def _close_instance(self, request: Message) -> Message:
        instance = self._instances.pop(request["instance"], None)
        if instance is not None:
            instance.close()
        return {}


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a line; bytes in it become objects that `decode_value` reverses."""
    return json.dumps(message, default=_encode_bytes, separators=(",", ":")).encode() + b"\n"


def decode_value(value: Any) -> Any:
    """Decode a value of a database. Databases hold no objects, so an object always means bytes."""
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value


def _encode_bytes(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return {"base64": base64.b64encode(value).decode()}


def main() -> None:
    # Apps then print to standard error.
    parent = ParentChannel()
    host = InstanceHost()
    parent.write(encode({}))
    for line in parent.read_lines():
        answer = encode(host.answer_request(line))
        if len(answer) > MAX_ANSWER_BYTES:
            reason = f"it has {len(answer)} bytes, more than {MAX_ANSWER_BYTES}"
            answer = encode({"too_large": reason})
        parent.write(answer)


if __name__ == "__main__":
    main()
