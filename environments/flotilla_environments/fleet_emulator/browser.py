"""Leased browsers: each has the tool `computer`, for the pages of running instances."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from flotilla_environments.api import ToolError, ToolSpec
from flotilla_environments.fleet_emulator.computer.screen import Screen
from flotilla_environments.fleet_emulator.computer.tool import Action, Computer, Pictures
from flotilla_environments.fleet_emulator.faults import BAD_GATEWAY
from flotilla_environments.fleet_emulator.instance_lookup import UpstreamError
from flotilla_environments.server.codec import ApiError, parse_body
from flotilla_environments.server.mcp_tools import ToolEndpoint

MCP_PATH = "/browsers/{lease_id}/mcp"
_PATH = "/v1/browser"


class LeaseBrowser(BaseModel):
    """POST /v1/browser. `allowed_hosts`: the only ones whose pages it opens; all when empty."""

    ttl_seconds: int = Field(default=1_800, gt=0, le=86_400)
    allowed_hosts: list[str] = []


class _Blank:
    """A page without an app."""

    def tools(self) -> list[ToolSpec]:
        return []

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        raise ToolError(f"unknown tool: {name}")


class Browser(Computer):
    """A screen that shows the page it has navigated to. `find` is the screen at a path."""

    def __init__(
        self,
        hosts: frozenset[str],
        find: Callable[[str], Screen | None],
        pictures: Callable[[], Pictures],
    ) -> None:
        super().__init__(Screen("about:blank", _Blank()), pictures)
        self._hosts = hosts
        self._find = find

    def perform_action(self, action: Action) -> None:
        if action.action == "navigate":
            self._navigate_to(action.url or "")
        else:
            super().perform_action(action)

    def _navigate_to(self, url: str) -> None:
        address = urlsplit(url)
        if self._hosts and address.hostname not in self._hosts:
            raise ToolError(f"{address.hostname} is not among the browser's allowed hosts")
        screen = self._find(address.path)
        if screen is None:
            raise ToolError(f"no page at {url}: open the address of a running instance")
        self.screen = screen


@dataclass(frozen=True)
class _Lease:
    browser: Browser
    expires_at: float


class Browsers:
    """Leases of browsers; `now` is in seconds on the leases' clock."""

    def __init__(
        self,
        endpoint: ToolEndpoint,
        now: Callable[[], float],
        find: Callable[[str], Screen | None],
        pictures: Callable[[], Pictures],
    ) -> None:
        self._endpoint = endpoint
        self._now = now
        self._find = find
        self._pictures = pictures
        self._leases: dict[str, _Lease] = {}

    def build_routes(self) -> list[BaseRoute]:
        one = f"{_PATH}/{{lease_id}}"
        return [
            Route(_PATH, self.lease_browser, methods=["POST"]),
            Route(one, self.get_browser),
            Route(f"{one}/health", self.get_browser),
            Route(one, self.release_browser, methods=["DELETE"]),
            Route(MCP_PATH, _Endpoint(self)),
        ]

    async def lease_browser(self, request: Request) -> Response:
        body = await parse_body(LeaseBrowser, request)
        now = self._now()
        self._leases = {i: lease for i, lease in self._leases.items() if lease.expires_at > now}
        browser = Browser(frozenset(body.allowed_hosts), self._find, self._pictures)
        lease_id = f"b{uuid.uuid4().hex[:16]}"
        self._leases[lease_id] = _Lease(browser, now + body.ttl_seconds)
        base = str(request.base_url).rstrip("/")
        return JSONResponse(
            {
                "lease_id": lease_id,
                "browser_id": lease_id,
                "mcp_url": base + MCP_PATH.format(lease_id=lease_id),
                "cdp_url": None,
                "stream_url": None,
                "host_domain": request.url.hostname,
            }
        )

    async def get_browser(self, request: Request) -> Response:
        lease_id = request.path_params["lease_id"]
        left = self._find_lease(lease_id).expires_at - self._now()
        body = {"lease_id": lease_id, "status": "running", "healthy": True, "ttl_seconds": left}
        return JSONResponse(body)

    async def release_browser(self, request: Request) -> Response:
        lease_id = request.path_params["lease_id"]
        self._find_lease(lease_id)
        del self._leases[lease_id]
        return JSONResponse({"lease_id": lease_id, "status": "released"})

    async def serve_mcp(self, scope: Scope, receive: Receive, send: Send) -> None:
        """MCP; a browser that is gone answers as the proxy before it does."""
        try:
            lease = self._find_lease(scope["path_params"]["lease_id"])
        except ApiError as error:
            raise UpstreamError(502, BAD_GATEWAY) from error
        await self._endpoint.serve_request(lease.browser, scope, receive, send)

    def _find_lease(self, lease_id: str) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_at <= self._now():
            raise ApiError(404, f"Browser lease '{lease_id}' not found")
        return lease


class _Endpoint:
    """Wraps the method so that Starlette takes it for an ASGI application, not for a handler."""

    def __init__(self, browsers: Browsers) -> None:
        self._browsers = browsers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._browsers.serve_mcp(scope, receive, send)
