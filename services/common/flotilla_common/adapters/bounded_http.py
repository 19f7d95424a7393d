"""HTTP responses, bounded in bytes and time: a wrong or broken server cannot exhaust memory or
block the caller."""

import asyncio
import logging
import math
import ssl
from functools import cache
from typing import Any

import httpx

from flotilla_common.text.parsing import TextLimits, parse_json_aside
from flotilla_common.text.redaction import add_secret

# Ample for every API that is polled.
ANSWERS = TextLimits(bytes=2**20, values=2**14)
_WHOLE_S = 30.0
_LONGEST_WAIT_S = 3600.0


class AnswerError(httpx.HTTPError):
    """A response that was not read; the message states the cause."""


def open_client(secret: str, timeout_s: float, **settings: Any) -> httpx.AsyncClient:
    """Open an HTTP client; no log shows the secret, or a URL that contains it."""
    add_secret(secret)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return httpx.AsyncClient(timeout=timeout_s, verify=shared_ssl_context(), **settings)


@cache
def shared_ssl_context() -> ssl.SSLContext:
    """Return the SSL context with the public authorities' certificates, which are slow to
    read."""
    return httpx.create_ssl_context()


async def ask(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    limits: TextLimits = ANSWERS,
    whole_s: float = _WHOLE_S,
    **request: Any,
) -> httpx.Response:
    """Send one request and return the complete response. Raises httpx.HTTPError, also if the
    whole response takes longer than `whole_s` seconds."""
    # A few compressed bytes could expand without bound.
    headers = {**request.pop("headers", {}), "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(whole_s),
            http.stream(method, url, headers=headers, **request) as answer,
        ):
            content = await _content(answer, limits.bytes)
    except TimeoutError:
        raise httpx.ReadTimeout(f"no complete response within {whole_s:g} s") from None
    whole = httpx.Response(
        answer.status_code, headers=answer.headers, content=content, request=answer.request
    )
    # What the server calls its characters may be a codec that makes no text, such as base64.
    whole.encoding = "utf-8"
    return whole


async def json_of(answer: httpx.Response, limits: TextLimits = ANSWERS) -> Any:
    """Return the JSON value of a response. Raises ValueError."""
    return await parse_json_aside(answer.content, limits)


async def object_of(answer: httpx.Response, limits: TextLimits = ANSWERS) -> dict[str, Any]:
    """Return the JSON object of a response. Raises ValueError."""
    value = await json_of(answer, limits)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} instead of an object")  # noqa: TRY004
    return value


def retry_after(answer: httpx.Response) -> float:
    """Return the server's Retry-After in seconds, an hour at most; 5 s if it sends none."""
    try:
        wait_s = float(answer.headers.get("retry-after", ""))
    except ValueError:
        wait_s = math.nan
    return min(wait_s, _LONGEST_WAIT_S) if wait_s >= 0 else 5.0


async def _content(answer: httpx.Response, most: int) -> bytes:
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise AnswerError("the response is compressed, though the request forbids it")
    content = bytearray()
    async for piece in answer.aiter_raw():
        content += piece
        if len(content) > most:
            raise AnswerError(f"the response has more than {most} bytes")
    return bytes(content)
