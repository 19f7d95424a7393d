"""One exchange over HTTP, with the facts of a failure: status, Retry-After, and whether the request
may have been executed."""

import math
import os
import re
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from yarl import URL

from flotilla_common.text.parsing import ParseError, TextLimits, TooLargeError, parse_json_aside
from flotilla_env_gateway.large_values import dump_json_aside
from flotilla_env_gateway.ports import BackendError

# Limits for a server without its own configuration.
DEFAULT_LIMITS = TextLimits(bytes=16 * 2**20, values=2**18)
_JSON = {"content-type": "application/json"}
_ERROR_BYTES = 4000
_SHOWN = 200
_REDIRECTS = 5
# A host that does not accept the connection was sent nothing, and need not be awaited for long.
_CONNECT_S = 10.0
_CONNECT_SHARE = 0.9
# Servers close idle connections after 1 s or more, commonly 2 to 75.
_IDLE_S = 0.75
# Envoy's 503 for a request that it had passed on, unless the text rules that out.
_RESET = re.compile(r"reset reason: ")
_NOT_PASSED_ON = re.compile(
    r"(?<!latest )reset reason: (?:\w+ )?(?:connection failure|connection timeout|overflow|refused)"
)


def open_http_session(*, max_connections: int, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Open a connection pool for one server. A connection is reused only shortly after its last
    answer: a request on one that the server is just closing may or may not have been executed."""
    connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=_IDLE_S)
    # Instances at one host must not share cookies.
    cookies = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=cookies)


class HttpError(BackendError):
    """An answer with an HTTP status of 400 or more."""

    def __init__(self, status: int, body: str, retry_after_s: float | None) -> None:
        kind = {404: "not_found", 429: "throttled", 413: "too_large", 401: "auth", 403: "auth"}
        super().__init__(
            kind.get(status, "http"),
            f"HTTP {status}: {body[:500]}",
            delivered=None if _may_have_executed(status, body) else False,
            retry_after_s=retry_after_s,
            invalid=status in (400, 401, 403, 405, 413, 422),
            unreachable=status in (502, 503, 504),
        )
        self.status = status
        self.body = body


def _may_have_executed(status: int, body: str) -> bool:
    """Return True if the request may have been executed. 500, 502 and 504 may come after its
    execution, 503 only from some proxies; other statuses are refusals."""
    if status == 503:
        return bool(_RESET.search(body)) and not _NOT_PASSED_ON.search(body)
    return status >= 500


async def exchange_json(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_s: float,
    limits: TextLimits = DEFAULT_LIMITS,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[Any, Mapping[str, str]]:
    """Exchange JSON over HTTP once.

    Raises HttpError, and BackendError for a failure of the connection."""
    exchange = open_answer(http, method, url, timeout_s=timeout_s, body=body, headers=headers)
    async with exchange as answer:
        content = await read_body(answer, limits.bytes)
        return (await parse_json_aside(content, limits) if content else None), answer.headers


@asynccontextmanager
async def open_answer(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_s: float,
    connect_only: bool = False,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """Send a request and yield its answer for reading, within `timeout_s`; `connect_only` limits
    the time to connect by it, and leaves the rest to the caller. The URL is sent as written.
    Redirects are followed within their origin only: another host must see neither the request nor
    its key.

    Raises HttpError for a status of 400 or more, and BackendError for a failure of the connection,
    a refused redirect, and for answers that are too large or not JSON."""
    data = None
    if body is not None:
        data, headers = await dump_json_aside(body), {**_JSON, **(headers or {})}
    target = URL(url, encoded=url.isascii())
    with _translate_failures(url, timeout_s, connect_only=connect_only) as timeout:
        for _ in range(_REDIRECTS):
            async with http.request(
                method, target, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                if 300 <= answer.status < 400:
                    target = _redirect_target(answer)
                    continue
                if answer.status >= 400:
                    raise HttpError(
                        answer.status,
                        await _read_error_body(answer),
                        _parse_retry_after(answer.headers),
                    )
                yield answer
                return
    raise BackendError("redirect", f"more than {_REDIRECTS} redirects", delivered=False)


def _redirect_target(answer: aiohttp.ClientResponse) -> URL:
    """Return where a redirect leads. Raises BackendError unless it keeps the origin and the
    method."""
    location = answer.headers.get("Location", "")
    keeps_method = answer.method == "GET" or answer.status in (307, 308)
    with suppress(ValueError):
        target = answer.url.join(URL(location, encoded=True))
        if location and keeps_method and target.origin() == answer.url.origin():
            return target
    shown = location.partition("?")[0][:_SHOWN]
    message = f"HTTP {answer.status} leads to {shown!r}, which is not followed; configure that URL"
    raise BackendError("redirect", message, delivered=False, invalid=True)


@contextmanager
def _translate_failures(
    url: str, timeout_s: float, *, connect_only: bool
) -> Generator[aiohttp.ClientTimeout]:
    """Yield the time limits of an exchange; raise BackendError for a failure of its connection."""
    # 0 and less would mean no limit.
    timeout_s = max(0.001, timeout_s)
    # If connecting takes too long, nothing has been sent.
    connect_s = min(timeout_s * _CONNECT_SHARE, _CONNECT_S)
    total_s = None if connect_only else timeout_s
    url = show_url(url)
    try:
        yield aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s)
    except aiohttp.ConnectionTimeoutError as error:
        # A short wait does not prove that the host is unreachable.
        waited = connect_s >= _CONNECT_S
        kind = "connect" if waited else "timeout"
        message = f"{url} takes no connection within {connect_s:.1f} s"
        raise BackendError(kind, message, delivered=False, unreachable=waited) from error
    except TimeoutError:
        raise BackendError("timeout", f"no answer in {timeout_s:.1f} s", delivered=None) from None
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno or 0
        # Errors of name resolution have separate numbers, below 0.
        why = os.strerror(number) if number > 0 else str(error.os_error)
        message = f"{url} cannot be reached: {why}"
        raise BackendError("connect", message, delivered=False, unreachable=True) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        message = f"{type(error).__name__}: {error}"
        raise BackendError("connection", message, delivered=None, unreachable=True) from error
    except TooLargeError as error:
        raise too_large_error(error) from error
    except ParseError as error:
        message = f"the answer is not JSON: {error}"
        raise BackendError("protocol", message, delivered=None) from error


async def _read_error_body(answer: aiohttp.ClientResponse) -> str:
    """Read the beginning of an error's body, which may arrive in pieces."""
    content = bytearray()
    while len(content) < _ERROR_BYTES and (
        piece := await answer.content.read(_ERROR_BYTES - len(content))
    ):
        content += piece
    return content.decode("utf-8", "replace")


async def read_body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        _check_size(len(content), max_bytes)
    return bytes(content)


def _check_size(size: int, max_bytes: int) -> None:
    """Raise TooLargeError if there are more bytes than allowed."""
    if size > max_bytes:
        raise TooLargeError(f"it has more than {max_bytes} bytes")


def too_large_error(error: TooLargeError) -> BackendError:
    """Return the failure, which is final: another attempt would be as large."""
    message = (
        f"the answer is too large: {error} (max_answer_bytes and max_answer_values of the backend)"
    )
    return BackendError("too_large", message, delivered=None, invalid=True)


def show_url(url: str) -> str:
    """Return a URL for messages, without the query, which may hold a key."""
    shown, query, _ = url.partition("?")
    return f"{shown}{query and '?...'}"


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Parse Retry-After, a number of seconds or a date, into seconds."""
    header = headers.get("Retry-After", "")
    with suppress(ValueError):
        seconds = float(header)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    # A year of twenty digits overflows.
    with suppress(ValueError, OverflowError):
        moment = parsedate_to_datetime(header).replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    return None
