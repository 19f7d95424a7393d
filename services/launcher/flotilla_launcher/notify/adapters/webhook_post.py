"""A message to a webhook: one POST of JSON, and what its answer means."""

import asyncio
from collections.abc import Mapping

import httpx

from flotilla_common.adapters.bounded_http import open_client, retry_after

_TIMEOUT_S, _WHOLE_S = 10.0, 30.0
_TOO_MANY_REQUESTS = 429


class WebhookError(Exception):
    """A webhook did not take a message; the text does not show its URL. With `again`, another
    attempt may succeed, `after_s` seconds later."""

    def __init__(self, why: str, *, again: bool, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.again = again
        self.after_s = after_s


async def post_json(
    url: str,
    body: Mapping[str, object],
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Post a message to a webhook, whose URL is a secret. Raises WebhookError."""
    try:
        async with (
            asyncio.timeout(_WHOLE_S),
            open_client(url, timeout_s) as http,
            http.stream("POST", url, json=body, headers=headers or {}) as answer,
        ):
            # The status suffices, so the content is not read.
            pass
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        # The text of some of these errors is the URL.
        raise WebhookError(f"cannot be reached: {type(error).__name__}", again=True) from None
    if answer.is_success:
        return
    limited = answer.status_code == _TOO_MANY_REQUESTS
    raise WebhookError(
        f"answered HTTP {answer.status_code}",
        again=limited or answer.is_server_error,
        after_s=retry_after(answer) if limited else 0.0,
    )


def is_webhook_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))
