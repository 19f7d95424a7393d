"""One exchange over HTTP, with the facts of a failure: status, Retry-After, and whether the request
may have been executed."""

import asyncio
import math
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, cast

import aiohttp

from services.common.large_values import dump_json_aside
from services.common.parsing import ParseError, TextLimits, TooLargeError, parse_json_aside
from services.env_gateway.ports import BackendError

# Limits for a server without its own configuration.
DEFAULT_LIMITS = TextLimits(bytes=16 * 2**20, values=2**18)
_JSON = {"content-type": "application/json"}
_LINES_AT_ONCE = 512
_ERROR_BYTES = 4000
# A host that does not accept the connection was sent nothing, and need not be awaited for long.
_CONNECT_S = 10.0
_CONNECT_SHARE = 0.9
# Envoy's 503 for a request that it had passed on, unless the text rules that out.
_RESET = re.compile(r"reset reason: ")
_NOT_PASSED_ON = re.compile(
    r"(?<!latest )reset reason: (?:\w+ )?(?:connection failure|connection timeout|overflow|refused)"
)


def open_http_session(*, max_connections: int, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Open a connection pool for one server. Idle connections are dropped before common servers
    drop them (5 s), or a request could hit a connection that is just being closed."""
    connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=4.0)
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
            invalid=status in (400, 401, 405, 413, 422),
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
    message_id: int | None = None,
) -> tuple[Any, Mapping[str, str]]:
    """Exchange JSON over HTTP once; an SSE answer is read up to the message with `message_id`.

    Raises HttpError, and BackendError for a failure of the connection."""
    data = None
    if body is not None:
        data, headers = await dump_json_aside(body), {**_JSON, **(headers or {})}
    with _translate_failures(url, timeout_s) as timeout:
        async with http.request(method, url, data=data, headers=headers, timeout=timeout) as answer:
            if answer.status >= 400:
                raise HttpError(
                    answer.status,
                    await _read_error_body(answer),
                    _parse_retry_after(answer.headers),
                )
            if answer.content_type == "text/event-stream":
                return await _read_sse(answer, message_id, limits), answer.headers
            content = await _read_body(answer, limits.bytes)
            return (await parse_json_aside(content, limits) if content else None), answer.headers


@contextmanager
def _translate_failures(url: str, timeout_s: float) -> Generator[aiohttp.ClientTimeout]:
    """Yield the time limits of an exchange; raise BackendError for a failure of its connection."""
    # 0 and less would mean no limit.
    timeout_s = max(0.001, timeout_s)
    # If connecting takes too long, nothing has been sent.
    connect_s = min(timeout_s * _CONNECT_SHARE, _CONNECT_S)
    try:
        yield aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s)
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
        refuse_too_large(error)
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


async def _read_body(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        _check_size(len(content), max_bytes)
    return bytes(content)


def _check_size(size: int, max_bytes: int) -> None:
    """Raise TooLargeError if there are more bytes than allowed."""
    if size > max_bytes:
        raise TooLargeError(f"it has more than {max_bytes} bytes")


def refuse_too_large(error: TooLargeError) -> NoReturn:
    """Raise BackendError, which is final: another attempt would be as large."""
    message = (
        f"the answer is too large: {error} (max_answer_bytes and max_answer_values of the backend)"
    )
    raise BackendError("too_large", message, delivered=None, invalid=True) from error


async def _read_sse(
    answer: aiohttp.ClientResponse, message_id: int | None, limits: TextLimits
) -> Any:
    # Pieces of an unfinished line, joined only once because it may be a whole picture.
    rest: list[bytes] = []
    data: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        _check_size(size, limits.bytes)
        *lines, last = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join((*rest, lines[0]))
            rest.clear()
        rest.append(last)
        for number, line in enumerate(lines, 1):
            if message := await _take_sse_line(line.rstrip(b"\r"), data, message_id, limits):
                return message
            if number % _LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
    raise BackendError("stream_cut", "the stream ended without an answer", delivered=None)


async def _take_sse_line(
    line: bytes, data: list[bytes], message_id: int | None, limits: TextLimits
) -> dict[str, Any] | None:
    """Process one line of a stream; return the awaited message once a blank line completes it."""
    if line.startswith(b"data:"):
        data.append(line[5:].strip())
    if line or not data:
        return None
    message = await parse_json_aside(b"\n".join(data), limits)
    data.clear()
    answers = isinstance(message, dict) and ("result" in message or "error" in message)
    if not answers or message.get("id") != message_id:
        return None
    return cast("dict[str, Any]", message)


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
