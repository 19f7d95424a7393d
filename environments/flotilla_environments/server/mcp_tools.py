"""MCP over streamable HTTP: one server for all instances, which finds them by the request's path.

By default it is stateless with JSON responses: no session is kept, so none can leak, and a tool
call is one POST.
"""

import base64
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from starlette.types import Receive, Scope, Send

from flotilla_environments.api import Picture, ToolError, ToolSpec

_Context = ServerRequestContext[Any, Any]
_TOOLS = "flotilla.tools"  # key of the ASGI scope


class Tools(Protocol):
    """Tools that are served at one address; an instance of an app has this shape."""

    def tools(self) -> list[ToolSpec]: ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the JSON-able value or the `Picture`. Raises `ToolError`."""
        ...


def _served_tools(context: _Context) -> Tools:
    assert context.request is not None, "only served over HTTP"
    return context.request.scope[_TOOLS]


def to_mcp_tool(spec: ToolSpec) -> Tool:
    """Describe a tool as MCP lists it, with the hints by which clients judge retries."""
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
    return ListToolsResult(tools=[to_mcp_tool(spec) for spec in _served_tools(context).tools()])


async def _call_tool(context: _Context, params: CallToolRequestParams) -> CallToolResult:
    try:
        value = _served_tools(context).call(params.name, params.arguments or {})
    except ToolError as error:
        return _text_result(str(error), is_error=True)
    if isinstance(value, Picture):
        data = base64.b64encode(value.png).decode()
        return CallToolResult(
            content=[ImageContent(type="image", data=data, mime_type="image/png")]
        )
    return _text_result(json.dumps(value), is_error=False)


def _text_result(text: str, *, is_error: bool) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)


class ToolEndpoint:
    """ASGI endpoint for the tools of any number of instances.

    With `sessions` it keeps one for every client that initializes, and answers in event streams,
    as most MCP servers in the field do.
    """

    def __init__(self, *, sessions: bool = False) -> None:
        server: Server[Any] = Server(
            "flotilla-environments",
            on_list_tools=_list_tools,
            on_call_tool=_call_tool,
            # No tool has an argument that must be repeated in a header: to check that, each call
            # would list the tools.
            get_tool_input_schema=lambda name: None,
        )
        self._manager = StreamableHTTPSessionManager(
            server, json_response=not sessions, stateless=not sessions
        )

    @asynccontextmanager
    async def run_sessions(self) -> AsyncGenerator[None]:
        async with self._manager.run():
            yield

    async def serve_request(self, tools: Tools, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_TOOLS] = tools
        await self._manager.handle_request(scope, receive, send)
