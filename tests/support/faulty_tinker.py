"""A proxy in front of a Tinker service that fails as a test wants it to: refused calls, dropped
connections, lost answers, delays, outages."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.http_server import serving_app

PREFIX = "/api/v1/"
# Headers that belong to one connection, not to the call.
_OWN_HEADERS = {"connection", "content-length", "date", "host", "keep-alive", "transfer-encoding"}


@dataclass(slots=True)
class _Fault:
    """What becomes of the next `times` calls; with neither a status nor a dropped connection they
    are only late."""

    pattern: str
    times: float
    status: int | None = None
    body: Mapping[str, Any] | None = None
    dropped: bool = False
    # The service carries the call out, and its answer is lost.
    carried_out: bool = False
    delay_s: float = 0.0


class FaultyTinker:
    """The proxy. Calls are named by their path below /api/v1/, such as `asample`, and faults by
    patterns of names, such as `sessions/*`; faults of one call come true one after another.

    `upstream` may change while it serves, as the address of a restarted service does."""

    def __init__(self, upstream: str, http: aiohttp.ClientSession) -> None:
        self.upstream = upstream
        self.url = ""
        # Calls that arrived, those of an outage included.
        self.calls: Counter[str] = Counter()
        self._http = http
        self._faults: list[_Fault] = []
        self._is_down = False
        self._open: set[asyncio.BaseTransport] = set()

    def count(self, pattern: str) -> int:
        """Return how many calls of a name arrived."""
        return sum(count for name, count in self.calls.items() if fnmatch(name, pattern))

    def refuse(
        self, pattern: str, status: int, *, times: float = 1, body: Mapping[str, Any] | None = None
    ) -> None:
        """Answer the next calls with a status; the service does not see them."""
        self._faults.append(_Fault(pattern, times, status, body))

    def drop(self, pattern: str, *, times: float = 1, carried_out: bool = False) -> None:
        """Close the connections of the next calls without an answer; if `carried_out`, after the
        service has answered."""
        self._faults.append(_Fault(pattern, times, dropped=True, carried_out=carried_out))

    def delay(self, pattern: str, seconds: float, *, times: float = 1) -> None:
        """Pass the next calls on so much later."""
        self._faults.append(_Fault(pattern, times, delay_s=seconds))

    def heal(self) -> None:
        """End the outage, and forget all faults that have not come true."""
        self._is_down = False
        self._faults.clear()

    def go_down(self) -> None:
        """Close all connections, and from now on every new one, until `heal`."""
        self._is_down = True
        for transport in self._open:
            _abort(transport)

    async def answer(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix(PREFIX)
        self.calls[name] += 1
        transport = request.transport
        assert transport is not None
        self._open.add(transport)
        try:
            answer = await self._find_answer(request, name)
        finally:
            self._open.discard(transport)
        if answer is None or self._is_down:
            _abort(transport)
        return answer or web.Response()

    async def _find_answer(self, request: web.Request, name: str) -> web.Response | None:
        """Return the answer to a call; None if its connection is dropped."""
        fault = None if self._is_down else self._take_fault(name)
        if self._is_down or (fault and fault.dropped and not fault.carried_out):
            return None
        if fault and fault.status:
            return web.json_response(fault.body or {"error": "a test"}, status=fault.status)
        await asyncio.sleep(fault.delay_s if fault else 0.0)
        answer = await self._pass_on(request)
        return None if fault and fault.dropped else answer

    def _take_fault(self, name: str) -> _Fault | None:
        fault = next((each for each in self._faults if fnmatch(name, each.pattern)), None)
        if fault is not None:
            fault.times -= 1
            if fault.times < 1:
                self._faults.remove(fault)
        return fault

    async def _pass_on(self, request: web.Request) -> web.Response | None:
        """Return the service's answer; None if it gives none."""
        url, headers = self.upstream + request.raw_path, _without_own(request.headers)
        try:
            body = await request.read()
            async with self._http.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, ConnectionError):
            return None
        return web.Response(body=data, status=answer.status, headers=_without_own(answer.headers))


def _without_own(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}


def _abort(transport: asyncio.BaseTransport) -> None:
    if isinstance(transport, asyncio.Transport):
        transport.abort()


@asynccontextmanager
async def faulty_tinker(upstream: str) -> AsyncGenerator[FaultyTinker]:
    """Serve a proxy of the service at a URL; clients use the proxy's `url`."""
    # What is compressed stays so.
    async with aiohttp.ClientSession(auto_decompress=False) as http:
        proxy = FaultyTinker(upstream, http)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", proxy.answer)
        async with serving_app(app, auto_decompress=False) as proxy.url:
            yield proxy
