"""The emulator as one HTTP application."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcp.server.transport_security import RequestBodyLimitMiddleware
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from flotilla_environments.fleet_emulator.admin import Admin
from flotilla_environments.fleet_emulator.auth import FleetAuth
from flotilla_environments.fleet_emulator.browser import Browsers
from flotilla_environments.fleet_emulator.codec import problems_body
from flotilla_environments.fleet_emulator.control_plane import FleetControlPlane
from flotilla_environments.fleet_emulator.fault_injection import FaultInjector
from flotilla_environments.fleet_emulator.faults import FaultPlan
from flotilla_environments.fleet_emulator.instance_lookup import FleetLookup, UpstreamError
from flotilla_environments.fleet_emulator.mcp import Desks, FleetRunner, InstanceTools
from flotilla_environments.fleet_emulator.request_counters import Counters
from flotilla_environments.fleet_emulator.task_catalogue import SessionStore, TaskStore
from flotilla_environments.fleet_emulator.verifier_pool import VerifierPool
from flotilla_environments.fleet_emulator.verifiers import Verifiers
from flotilla_environments.server.app import answer_error
from flotilla_environments.server.codec import ApiError, InvalidBodyError
from flotilla_environments.server.http_process import HOST_HEADERS
from flotilla_environments.server.instance_registry import Registry
from flotilla_environments.server.mcp_tools import ToolEndpoint

MAX_BODY_BYTES = 64 * 2**20  # a verifier's arguments hold the transcript of an episode


@dataclass(frozen=True)
class Options:
    """`key` is the required API key; `speed` is the factor by which instances' clocks run."""

    env_keys: tuple[str, ...]
    tasks: list[dict[str, Any]]
    key: str | None = None
    instance_limit: int = 4_096
    verifier_workers: int = 2
    verifier_seconds: float = 60.0
    verifiers_over_http: bool = False
    mcp_sessions: bool = False
    speed: float = 1.0


class Emulator:
    """All of its parts, put together."""

    def __init__(self, options: Options) -> None:
        # A server that requires a key also guards its runners, whose clients send no key.
        self.plan = FaultPlan(runner_token=options.key)
        self.counters = Counters()
        self.registry = Registry(options.instance_limit)
        self.lookup = FleetLookup(self.registry)
        self.endpoint = ToolEndpoint(sessions=options.mcp_sessions)
        self.desks = Desks(self.registry, self.plan, self.counters)
        self.tasks = TaskStore(options.tasks)
        self.control = FleetControlPlane(
            self.registry,
            self.lookup,
            options.env_keys,
            options.speed,
            self.plan,
            self.counters,
            self.tasks,
        )
        self.admin = Admin(self.registry, self.plan, self.counters, self.desks)
        secrets = {"FLEET_API_KEY": options.key, "RUNNER_AUTH_TOKEN": options.key}
        self.pool = VerifierPool(
            options.verifier_workers, {name: value for name, value in secrets.items() if value}
        )
        self.verifiers = Verifiers(
            self.pool,
            self.lookup,
            self.tasks,
            self.plan,
            self.counters,
            max_seconds=options.verifier_seconds,
            over_http=options.verifiers_over_http,
        )

    def build_routes(self) -> list[BaseRoute]:
        tools = partial(InstanceTools, self.lookup, self.endpoint, self.plan, self.control.now)
        return [
            *self.make_browsers().build_routes(),
            Route("/{instance_id}/mcp", tools(self.desks.get_own_tools)),
            Route("/{instance_id}/api/v1/mcp", tools(self.desks.get_all_tools)),
            *self.admin.build_routes(),
            *self.control.build_routes(),
            *self.tasks.build_routes(),
            *SessionStore().build_routes(),
            *self.verifiers.build_routes(),
            *FleetRunner(self.lookup, self.desks).build_routes(),
        ]

    def make_browsers(self) -> Browsers:
        return Browsers(
            self.endpoint,
            self.control.now,
            self.desks.open_page,
            lambda: self.plan.settings.pictures,
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with self.control.run_reaper(), self.endpoint.run_sessions():
            try:
                yield
            finally:
                await self.pool.close()


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidBodyError)
    return JSONResponse({"detail": problems_body(error.problems)}, 422)


async def _answer_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, UpstreamError)
    return HTMLResponse(error.page, error.status)


def build_app(options: Options) -> ASGIApp:
    """The application: one process, one event loop; only verifiers run elsewhere."""
    emulator = Emulator(options)
    app = Starlette(
        routes=emulator.build_routes(),
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOST_HEADERS)),
            Middleware(
                FaultInjector,
                plan=emulator.plan,
                counters=emulator.counters,
                kill=emulator.admin.stop_instance,
            ),
            Middleware(FleetAuth, plan=emulator.plan, key=options.key),
        ],
        exception_handlers={
            InvalidBodyError: _answer_invalid,
            ApiError: answer_error,
            UpstreamError: _answer_page,
        },
        lifespan=emulator.lifespan,
    )
    return RequestBodyLimitMiddleware(app, MAX_BODY_BYTES)
