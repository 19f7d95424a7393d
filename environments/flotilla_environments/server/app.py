"""The HTTP application: control plane, instance runner and tools."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from mcp.server.transport_security import RequestBodyLimitMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla_environments.server.auth import BearerToken
from flotilla_environments.server.codec import ApiError
from flotilla_environments.server.control_plane import ControlPlane
from flotilla_environments.server.instance_lookup import InstanceLookup
from flotilla_environments.server.instance_registry import Registry
from flotilla_environments.server.instance_runner import Runner
from flotilla_environments.server.mcp_tools import ToolEndpoint

MAX_BODY_BYTES = 2**20


class _Tools:
    """ASGI application of an instance's MCP address."""

    def __init__(self, lookup: InstanceLookup, endpoint: ToolEndpoint) -> None:
        self._lookup = lookup
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        instance = self._lookup.find_running(Request(scope))
        await self._endpoint.serve_request(instance, scope, receive, send)


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse({"detail": error.detail}, error.status)


def build_app(
    registry: Registry, env_keys: tuple[str, ...], *, hosts: list[str], token: str | None
) -> ASGIApp:
    """The application; `hosts` are the Host headers it answers to, against DNS rebinding.

    One process, one event loop: tools run to completion in turn.
    """
    lookup, endpoint = InstanceLookup(registry), ToolEndpoint()
    control = ControlPlane(registry, lookup, env_keys)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with control.run_reaper(), endpoint.run_sessions():
            yield

    routes = [
        Route("/{instance_id}/mcp", _Tools(lookup, endpoint), methods=["POST"]),
        *control.build_routes(),
        *Runner(lookup).build_routes(),
    ]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    if token:
        middleware.append(Middleware(BearerToken, token=token))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: answer_error},
        lifespan=lifespan,
    )
    return RequestBodyLimitMiddleware(app, MAX_BODY_BYTES)
