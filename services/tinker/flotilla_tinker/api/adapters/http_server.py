"""The protocol over HTTP."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import join_host_port
from flotilla_tinker.api.adapters.request_bodies import BodyError, read_body
from flotilla_tinker.api.answering import answer_call, refuse
from flotilla_tinker.api.calls import ApiAnswer, ClientCall, Front
from flotilla_tinker.api.keys import ClientKeys, read_key
from flotilla_tinker.api.routes import PREFIX, ROUTES, ApiRoute

_BACKLOG = 4096
_GRACE_S = 2
# Clients keep connections for a minute; one that is closed as it is used again costs a retry.
_KEEP_ALIVE_S = 75
_NO_KEY = (
    "this key is unknown: set TINKER_API_KEY to one of this server's, which `flotilla tinker-serve`"
    " prints"
)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address and limits of the server; `certificate` and `key` are PEM files."""

    host: str
    port: int
    body_bytes: int
    certificate: Path | None = None
    key: Path | None = None


class _Endpoint:
    """One route as Starlette calls it."""

    def __init__(self, route: ApiRoute, front: Front, keys: ClientKeys, body_bytes: int) -> None:
        self._route = route
        self._front = front
        self._keys = keys
        self._body_bytes = body_bytes

    async def answer(self, request: Request) -> Response:
        return _make_response(await self._find_answer(request))

    async def _find_answer(self, request: Request) -> ApiAnswer:
        tenant = self._keys.find_tenant(read_key(request.headers))
        if tenant is None and not self._route.is_open:
            return refuse(401, _NO_KEY)
        try:
            # Of a client without a key nothing is read.
            body = b"" if self._route.is_open else await read_body(request, self._body_bytes)
        except BodyError as error:
            return refuse(error.status, str(error))
        except ClientDisconnect:
            return refuse(400, "the client hung up")
        call = ClientCall(
            tenant=tenant or "",
            path=request.path_params,
            query=dict(request.query_params),
            accept=request.headers.get("accept", "*/*"),
            body=body,
        )
        return await answer_call(self._route.handle, self._front, call)


def _make_response(answer: ApiAnswer) -> Response:
    if answer.file is not None:
        return FileResponse(
            answer.file, media_type=answer.content_type, filename=f"{answer.file.stem}.tar"
        )
    return Response(
        answer.body, answer.status, headers=answer.headers, media_type=answer.content_type
    )


def create_app(front: Front, keys: ClientKeys, body_bytes: int) -> Starlette:
    """Make the application."""
    routes = [
        Route(
            f"{PREFIX}{route.path}",
            _Endpoint(route, front, keys, body_bytes).answer,
            methods=[route.method],
        )
        for route in ROUTES
    ]
    return Starlette(routes=routes, exception_handlers={404: _refuse_path, 405: _refuse_method})


async def _refuse_path(request: Request, error: Exception) -> Response:
    return _make_response(refuse(404, f"this server has no call {request.url.path}"))


async def _refuse_method(request: Request, error: Exception) -> Response:
    return _make_response(refuse(405, f"{request.url.path} does not take {request.method}"))


class _QuietServer(uvicorn.Server):
    """Leaves signals to the service's process."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@asynccontextmanager
async def serving_http(
    front: Front, keys: ClientKeys, settings: ServerSettings
) -> AsyncGenerator[str]:
    """Serve during the block; yield the address. Raises ConfigError if it cannot be listened on."""
    listener = _listen(settings)
    config = uvicorn.Config(
        create_app(front, keys, settings.body_bytes),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # Nobody asks where a call came from.
        proxy_headers=False,
        backlog=_BACKLOG,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        listener.close()
        raise ConfigError(f"tinker.tls: the files are not usable PEM: {error}") from error
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not (server.started or serving.done()):  # noqa: ASYNC110 (uvicorn tells nobody)
            await asyncio.sleep(0.01)
        yield join_host_port(settings.host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The explicit protocol makes asyncio switch off Nagle's algorithm, which adds 40 ms.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((settings.host, settings.port))
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"tinker.listen: cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        ) from error
    return opened
