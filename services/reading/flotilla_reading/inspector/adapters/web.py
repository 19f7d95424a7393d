"""The inspector over HTTP: one Starlette application for a browser on this machine."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.text.printable_text import print_json
from flotilla_reading.inspector.adapters.access import Access, Guard
from flotilla_reading.inspector.adapters.rendering import STATIC, PageRenderer
from flotilla_reading.inspector.pages.book import PageBook
from flotilla_reading.inspector.pages.curves import curves_page
from flotilla_reading.inspector.pages.links import ServerLinks
from flotilla_reading.inspector.pages.messages import image_type, raw_text
from flotilla_reading.inspector.pages.page import Page
from flotilla_reading.inspector.pages.search import search_page
from flotilla_reading.inspector.pages.tasks import compare_page, task_page
from flotilla_reading.inspector.queries.run_folders import NotFoundError
from flotilla_reading.inspector.queries.run_library import RunLibrary

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_GRACE_S = 2
_MOST_DIGITS = 9


class InspectorPages:
    """Handlers of the application. They are plain functions, which run in threads, because they
    read files."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._links = ServerLinks()
        self._book = PageBook(library, self._links)
        self._renderer = PageRenderer()

    def routes(self) -> list[BaseRoute]:
        attempt = "/runs/{run}/attempts/{group}/{index}/{attempt_try}"
        return [
            Route("/", self.home),
            Route("/curves", self.curves),
            Route("/compare", self.compare),
            Route("/runs/{run}", self.run),
            Route("/runs/{run}/live.html", self.live),
            Route("/runs/{run}/analysis", self.analysis),
            Route("/runs/{run}/steps", self.steps),
            Route("/runs/{run}/steps/{step}", self.step),
            Route("/runs/{run}/evals/{eval_id}", self.eval),
            Route("/runs/{run}/attempts", self.search),
            Route("/runs/{run}/task", self.task),
            Route(attempt, self.attempt),
            Route(f"{attempt}/tokens.bin", self.tokens),
            Route(f"{attempt}/hold", self.hold),
            Route(f"{attempt}/raw/{{sequence}}/{{part}}", self.raw),
            Route(f"{attempt}/media/{{sequence}}/{{number}}", self.media),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

    def home(self, request: Request) -> Response:
        return self._page(self._book.home())

    def run(self, request: Request) -> Response:
        return self._page(self._book.run(request.path_params["run"]))

    def analysis(self, request: Request) -> Response:
        data = self._book.analysis(request.path_params["run"])
        return Response(data, media_type="text/html; charset=utf-8")

    def live(self, request: Request) -> Response:
        return self._page(self._book.live(request.path_params["run"]))

    def steps(self, request: Request) -> Response:
        before = _read_number(request.query_params, "before", -1)
        run = request.path_params["run"]
        return self._page(self._book.steps(run, before if before >= 0 else None))

    def step(self, request: Request) -> Response:
        run, step = request.path_params["run"], _read_number(request.path_params, "step")
        return self._page(self._book.step(run, step, _read_number(request.query_params, "page", 1)))

    def eval(self, request: Request) -> Response:
        run, eval_id = request.path_params["run"], request.path_params["eval_id"]
        page = _read_number(request.query_params, "page", 1)
        return self._page(self._book.eval(run, eval_id, page))

    def attempt(self, request: Request) -> Response:
        run, key = _attempt_of(request)
        episode, query = self._book.episode(run, key), request.query_params
        sequence = _read_number(query, "sequence", 0)
        view = query.get("view", "conversation")
        if view == "tokens":
            return self._page(self._book.tokens(run, episode, sequence))
        if view == "table":
            page = _read_number(query, "page", 1)
            return self._page(self._book.table(run, episode, sequence, page))
        return self._page(self._book.conversation(run, episode))

    def tokens(self, request: Request) -> Response:
        run, key = _attempt_of(request)
        sequence = _read_number(request.query_params, "sequence", 0)
        data = self._book.token_data(self._book.episode(run, key), sequence)
        # Not compressed: on loopback, compression takes longer than sending raw numbers.
        headers = {"Content-Encoding": "identity"}
        return Response(data, headers=headers, media_type="application/octet-stream")

    def hold(self, request: Request) -> Response:
        """Protect the content of an open page from pruning for another minute."""
        self._book.episode(*_attempt_of(request))
        return Response(status_code=204)

    def raw(self, request: Request) -> Response:
        run, key = _attempt_of(request)
        sequence, part = _read_number(request.path_params, "sequence"), request.path_params["part"]
        text = raw_text(self._book.episode(run, key), sequence, part)
        headers = {"Content-Disposition": 'attachment; filename="text.txt"'}
        data = text.encode(errors="replace")
        return Response(data, media_type="text/plain; charset=utf-8", headers=headers)

    def media(self, request: Request) -> Response:
        run, key = _attempt_of(request)
        sequence = _read_number(request.path_params, "sequence")
        number = _read_number(request.path_params, "number")
        item = self._book.episode(run, key).media_of(sequence, number)
        kind = image_type(item.content)
        if not kind:
            raise NotFoundError("Browsers cannot show this as an image.")
        return Response(item.content, media_type=kind)

    def curves(self, request: Request) -> Response:
        query = request.query_params
        runs, metrics = query.getlist("run"), query.getlist("metric")
        own = query.get("axes") == "own"
        return self._page(curves_page(self._library, runs, metrics, own_axes=own))

    def search(self, request: Request) -> Response:
        run, query = request.path_params["run"], request.query_params
        before = _read_number(query, "before", 0) or None
        return self._page(search_page(self._library, self._links, run, query, before))

    def task(self, request: Request) -> Response:
        run, query = request.path_params["run"], request.query_params
        before = _read_number(query, "before", 0) or None
        return self._page(task_page(self._library, self._links, run, query.get("key", ""), before))

    def compare(self, request: Request) -> Response:
        query = request.query_params
        runs, attempts = query.getlist("run")[:2], query.getlist("attempt")[:2]
        if not runs:
            raise NotFoundError("The address of two attempts side by side names their runs.")
        places = list(zip_longest((runs * 2)[:2], attempts, fillvalue=""))
        task, read = query.get("task", ""), self._book.episode
        return self._page(compare_page(self._library, self._links, read, task, places))

    def refuse(self, status: int) -> Response:
        values = {"status": status, "message": _REFUSALS[status], "crumbs": ()}
        return self._page(Page("refused.html", f"{status}", values), status)

    def not_found(self, request: Request, error: Exception) -> Response:
        text = str(error) if isinstance(error, NotFoundError) else "There is no such page."
        values = {"status": 404, "message": text, "crumbs": ()}
        return self._page(Page("refused.html", "Not found", values), 404)

    def _page(self, page: Page, status: int = 200) -> Response:
        text = self._renderer.render(page, self._links)
        # Half a surrogate pair cannot be encoded.
        data = text.encode(errors="replace")
        return Response(data, status, media_type="text/html; charset=utf-8")


_REFUSALS = {
    401: "This page needs the token of the link that the inspector printed. Open that link; if it"
    " is lost, restart the inspector: flotilla inspect",
    421: "The inspector answers only on this machine's own addresses. Open the link that it"
    " printed.",
}


def create_app(library: RunLibrary, access: Access) -> Starlette:
    """Make the application."""
    pages = InspectorPages(library)
    return Starlette(
        routes=pages.routes(),
        middleware=[
            Middleware(Guard, access=access, refuse=pages.refuse),
            Middleware(GZipMiddleware, minimum_size=1024, compresslevel=1),
        ],
        exception_handlers={404: pages.not_found, NotFoundError: pages.not_found},
    )


class _Server(uvicorn.Server):
    """Announces its address, and treats a signal as a normal end."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not recorded as captured: uvicorn would raise it again, and the process would fail.
        self.force_exit = self.should_exit
        self.should_exit = True


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, and its address: a URL, or the path of a socket file."""

    socket: socket.socket
    url: str
    hosts: frozenset[str] | None


def listen_on(host: str, port: int) -> Listener:
    """Listen on a loopback address. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The explicit protocol makes asyncio switch off Nagle's algorithm, which adds 40 ms.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen(128)
    except OSError:
        opened.close()
        raise
    port = opened.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    hosts = frozenset(f"{each}:{port}" for each in _LOOPBACK)
    return Listener(opened, f"http://{name}:{port}/", hosts)


def listen_at(path: Path) -> Listener:
    """Listen at a socket file that only its user can open. Raises OSError."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        opened.bind(str(path))
        path.chmod(0o600)
        opened.listen(128)
    except OSError:
        opened.close()
        raise
    return Listener(opened, "http://localhost/", None)


def serve(
    library: RunLibrary,
    listener: Listener,
    *,
    token: str,
    path: str = "",
    end_with_stdin: bool = False,
) -> None:
    """Serve until a signal, or until standard input ends. Prints {"url": ...} once it serves;
    `path` is the page of the URL."""
    app = create_app(library, Access(token, listener.hosts))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    url = f"{listener.url}{path}?{urlencode({'token': token})}"
    server = _Server(config, lambda: print_json({"url": url}))
    if end_with_stdin:
        Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
    try:
        server.run([listener.socket])
    finally:
        library.close()


def _end_with_stdin(server: uvicorn.Server) -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            continue
    server.should_exit = True


def _attempt_of(request: Request) -> tuple[str, AttemptKey]:
    found = request.path_params
    index, attempt_try = _read_number(found, "index"), _read_number(found, "attempt_try")
    return found["run"], AttemptKey(found["group"], index, attempt_try)


def _read_number(
    values: Mapping[str, Any] | QueryParams, name: str, default: int | None = None
) -> int:
    """Return a number in an address. Raises NotFoundError."""
    text = values.get(name)
    if text is None and default is not None:
        return default
    if text and text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise NotFoundError(f"{name} is a number in addresses of pages, not {text!r}.")
