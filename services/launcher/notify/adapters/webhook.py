"""Messages as JSON to any URL. The receiver drops repeats by the header Idempotency-Key."""

import httpx

from services.launcher.adapters.bounded_http import ask
from services.launcher.notify.adapters.slack import open_client, raise_if_delayed
from services.launcher.notify.messages import Message
from services.launcher.notify.outbox import DeliveryTarget, Letter
from services.launcher.notify.sinks import DeliveryDelayedError, DeliveryRefusedError


class WebhookSink:
    """Sink that posts to a webhook. It cannot check whether a letter has arrived, and sends it
    again."""

    def __init__(self, target: DeliveryTarget, url: str) -> None:
        self._target = target
        self._url = url
        self._client = open_client(url)

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
        raise_if_delayed(answer, "the webhook", unsure=False)
        if not answer.is_success:
            raise DeliveryRefusedError(
                f"the webhook in {self._target.secret_env} answered HTTP {answer.status_code}:"
                " check its URL"
            )
        return ""

    async def find_thread(self, letter: Letter) -> str | None:
        return None

    async def close(self) -> None:
        await self._client.aclose()


def webhook_body(letter: Letter) -> dict[str, object]:
    """Return the request's body. Incoming webhooks of chats show its `text` alone."""
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
