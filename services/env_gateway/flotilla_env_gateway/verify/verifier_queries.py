"""Answers to the requests of a running verifier: databases, rows, read-only tool calls."""

import base64
from collections.abc import Sequence
from typing import Any

from flotilla_common.text.parsing import run_aside
from flotilla_env_gateway.large_values import run_aside_for
from flotilla_env_gateway.ports import QueryError, Rows, Text, Verification
from flotilla_env_gateway.verify.protocol import (
    ProtocolError,
    QueryRequest,
    SnapshotRequest,
    ToolCallRequest,
    WorkerMessage,
)

_ANSWER_CHARS = 2**20


class RequestAnswerer:
    """Answers one verifier's requests. Queries are refused for a database of which the
    process holds a copy: results from the copy concern only that process."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self._copied: set[str] = set()
        self._queried: set[str] = set()

    async def answer_to(self, message: WorkerMessage) -> Any:
        match message:
            case SnapshotRequest(db) if db not in self._copied:
                self._copied.add(db)
                content = await self._verification.snapshot(db)
                if content is None:
                    self._queried.add(db)
                    return None
                return await run_aside(len(content), lambda: base64.b64encode(content).decode())
            case QueryRequest(db, sql, args) if db in self._queried:
                return await self._query_rows(db, sql, args)
            case ToolCallRequest(name, arguments):
                return await self._call_tool(name, arguments)
            case _:
                raise ProtocolError("the verifier's process sent an unexpected request")

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._verification.call is None:
            return {"error": "there are no tools to call"}
        try:
            result = await self._verification.call(name, arguments)
        except QueryError as error:
            return {"error": str(error)}
        text = "\n".join(part.text for part in result.parts if isinstance(part, Text))
        return {"error" if result.is_error else "text": text[:_ANSWER_CHARS]}

    async def _query_rows(self, db: str, sql: str, args: Sequence[Any]) -> Any:
        try:
            rows = await self._verification.query(db, sql, args)
        except QueryError as error:
            return {"error": str(error)}
        return await run_aside_for(rows.rows, lambda: _encode_rows(rows))


def _encode_rows(rows: Rows) -> dict[str, Any]:
    return {
        "columns": rows.columns,
        "rows": [[_to_json_value(v) for v in row] for row in rows.rows],
    }


def _to_json_value(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
