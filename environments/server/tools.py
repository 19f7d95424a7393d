"""MCP over streamable HTTP: one server for every instance, found by the path of the request.

Stateless with JSON responses: no session is kept, so none can leak, and a tool call is one POST.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from starlette.types import Receive, Scope, Send

from environments.api import Instance, ToolError, ToolSpec

_Context = ServerRequestContext[Any, Any]


def _instance(context: _Context) -> Instance:
    assert context.request is not None, "only served over HTTP"
    return context.request.scope["flotilla.instance"]


def describe(spec: ToolSpec) -> Tool:
    """A tool as MCP lists it, with the hints by which clients judge what may be retried."""
    return Tool(
        name=spec.name,
        description=spec.description,
        input_schema=spec.parameters,
        annotations=ToolAnnotations(
            read_only_hint=spec.read_only,
            idempotent_hint=spec.idempotent,
            destructive_hint=spec.destructive,
            open_world_hint=False,
        ),
    )


async def _list_tools(context: _Context, params: PaginatedRequestParams | None) -> ListToolsResult:
    return ListToolsResult(tools=[describe(spec) for spec in _instance(context).tools()])


async def _call_tool(context: _Context, params: CallToolRequestParams) -> CallToolResult:
    try:
        value = _instance(context).call(params.name, params.arguments or {})
    except ToolError as error:
        return _text(str(error), is_error=True)
    return _text(json.dumps(value), is_error=False)


def _text(text: str, *, is_error: bool) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)


class ToolEndpoint:
    """ASGI endpoint; expects the instance in the scope under `flotilla.instance`."""

    def __init__(self) -> None:
        server: Server[Any] = Server(
            "flotilla-environments", on_list_tools=_list_tools, on_call_tool=_call_tool
        )
        self._manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        async with self._manager.run():
            yield

    async def serve(self, instance: Instance, scope: Scope, receive: Receive, send: Send) -> None:
        scope["flotilla.instance"] = instance
        await self._manager.handle_request(scope, receive, send)
