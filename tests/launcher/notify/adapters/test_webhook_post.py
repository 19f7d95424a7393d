"""Answers of webhooks to a message."""

from http.server import BaseHTTPRequestHandler

import pytest

from flotilla_common.rpc.free_ports import free_port
from flotilla_launcher.notify.adapters.webhook_post import WebhookError, post_json
from tests.support.http_answers import Answer, serve_answers


@pytest.mark.parametrize(
    ("status", "again", "after_s"), [(429, True, 7.0), (503, True, 0.0), (404, False, 0.0)]
)
async def test_a_message_that_is_not_taken_is_sent_again_if_that_may_help(
    status: int, again: bool, after_s: float
) -> None:
    def answer(_request: BaseHTTPRequestHandler) -> Answer:
        return status, {"retry-after": "7"}, b"no"

    with serve_answers(answer) as address, pytest.raises(WebhookError) as caught:
        await post_json(f"{address}/secret-path", {"text": "hello"})
    assert str(caught.value) == f"answered HTTP {status}"
    assert (caught.value.again, caught.value.after_s) == (again, after_s)


async def test_a_webhook_that_is_away_is_not_named() -> None:
    with pytest.raises(WebhookError, match=r"^cannot be reached: ConnectError$") as caught:
        await post_json(f"http://127.0.0.1:{free_port()}/secret-path", {"text": "hello"})
    assert caught.value.again
