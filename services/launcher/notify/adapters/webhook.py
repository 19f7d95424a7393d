"""Messages as JSON to any URL. The receiver drops repeats by the header Idempotency-Key."""

import logging

import httpx

from services.common.redaction import add_secret
from services.launcher.adapters.bounded_http import ask, retry_after
from services.launcher.notify.adapters.slack import shared_ssl_context
from services.launcher.notify.messages import Message
from services.launcher.notify.outbox import DeliveryTarget, Letter
from services.launcher.notify.sinks import DeliveryDelayedError, DeliveryRefusedError

_TIMEOUT_S = 10.0
_TOO_MANY_REQUESTS = 429


class WebhookSink:
    """Sink that posts to a webhook. It cannot look for a letter: one that may have arrived is
    sent again."""

    def __init__(self, target: DeliveryTarget, url: str) -> None:
        self._target = target
        self._url = url
        add_secret(url)
        # Its lines name the URL, which is a secret.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, verify=shared_ssl_context())

    async def send_letter(self, letter: Letter) -> str:
        if not self._url.startswith(("http://", "https://")):
            raise DeliveryRefusedError(
                f"the environment variable {self._target.secret_env} holds no http(s) URL: set it"
                " where the launcher starts, or leave launcher.notify.webhook_env out"
            )
        headers = {"Idempotency-Key": letter.key}
        try:
            body = webhook_body(letter)
            answer = await ask(self._client, "POST", self._url, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # The text of some of these errors is the URL.
            raise DeliveryDelayedError(
                f"the webhook cannot be reached: {type(error).__name__}"
            ) from None
        self._check_answer(answer)
        return ""

    def _check_answer(self, answer: httpx.Response) -> None:
        if answer.status_code == _TOO_MANY_REQUESTS:
            raise DeliveryDelayedError("the webhook limits the rate", after_s=retry_after(answer))
        if answer.is_server_error:
            raise DeliveryDelayedError(f"the webhook answered HTTP {answer.status_code}")
        if not answer.is_success:
            raise DeliveryRefusedError(
                f"the webhook in {self._target.secret_env} answered HTTP {answer.status_code}:"
                " check its URL"
            )

    async def find_thread(self, letter: Letter) -> str | None:
        return None

    async def close(self) -> None:
        await self._client.aclose()


def webhook_body(letter: Letter) -> dict[str, object]:
    """Return the request's body. `text` alone is what a chat's incoming webhook shows."""
    message = letter.message
    return {
        "run_id": letter.run_id,
        "event": letter.event,
        "time": letter.created,
        "kind": message.kind,
        "title": message.title,
        "facts": dict(message.facts),
        "detail": message.text,
        "log": message.log,
        "text": _plain_text(letter.run_id, message),
    }


def _plain_text(run_id: str, message: Message) -> str:
    facts = [f"{label}: {value}" for label, value in message.facts if value != run_id]
    return "\n".join(filter(None, [f"[{run_id}] {message.title}", *facts, message.text]))
