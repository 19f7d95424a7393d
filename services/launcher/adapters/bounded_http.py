"""Answers over HTTP, read no further than there is reason to: a server that is not the one meant,
or not what it was, fills no memory and takes no more time than it is given."""

import asyncio
import math
from typing import Any

import httpx

from services.common.parsing import TextLimits, parse_json_aside

# Nobody whom a launcher asks by the minute has more to say.
ANSWERS = TextLimits(bytes=2**20, values=2**14)
_WHOLE_S = 30.0
_LONGEST_WAIT_S = 3600.0


class AnswerError(httpx.HTTPError):
    """An answer that is not read; the message says why."""


async def ask(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    limits: TextLimits = ANSWERS,
    whole_s: float = _WHOLE_S,
    **request: Any,
) -> httpx.Response:
    """Return the answer to one request, with all of its content. Raises httpx.HTTPError, also when
    the whole takes longer than `whole_s`, however steadily it comes."""
    # A few bytes could unfold to any number of them.
    headers = {**request.pop("headers", {}), "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(whole_s),
            http.stream(method, url, headers=headers, **request) as answer,
        ):
            content = await _content(answer, limits.bytes)
    except TimeoutError:
        raise httpx.ReadTimeout(f"no whole answer within {whole_s:g} s") from None
    return httpx.Response(
        answer.status_code, headers=answer.headers, content=content, request=answer.request
    )


async def json_of(answer: httpx.Response, limits: TextLimits = ANSWERS) -> Any:
    """Return the value that an answer holds. Raises ValueError."""
    return await parse_json_aside(answer.content, limits)


async def object_of(answer: httpx.Response, limits: TextLimits = ANSWERS) -> dict[str, Any]:
    """Return the JSON object that an answer holds. Raises ValueError."""
    value = await json_of(answer, limits)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} instead of an object")  # noqa: TRY004
    return value


def retry_after(answer: httpx.Response) -> float:
    """Return the seconds that a server asks us to wait, an hour at most; a few where it does not
    say."""
    try:
        told = float(answer.headers.get("retry-after", ""))
    except ValueError:
        told = math.nan
    return min(told, _LONGEST_WAIT_S) if told >= 0 else 5.0


async def _content(answer: httpx.Response, most: int) -> bytes:
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise AnswerError("an answer that is compressed, which was not asked for")
    content = bytearray()
    async for piece in answer.aiter_raw():
        content += piece
        if len(content) > most:
            raise AnswerError(f"an answer of more than {most} bytes")
    return bytes(content)
