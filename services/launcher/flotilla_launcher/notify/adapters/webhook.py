"""Messages as JSON to any URL. The receiver drops repeats by the header Idempotency-Key."""

from flotilla_launcher.notify.adapters.webhook_post import WebhookError, is_webhook_url, post_json
from flotilla_launcher.notify.messages import Message
from flotilla_launcher.notify.outbox import DeliveryTarget, Letter
from flotilla_launcher.notify.sinks import DeliveryDelayedError, DeliveryRefusedError


class WebhookSink:
    """Sink that posts to a webhook. It cannot check whether a letter has arrived, and sends it
    again."""

    def __init__(self, target: DeliveryTarget, url: str) -> None:
        self._target = target
        self._url = url

    async def send_letter(self, letter: Letter) -> str:
        variable = self._target.secret_env
        if not is_webhook_url(self._url):
            raise DeliveryRefusedError(
                f"the environment variable {variable} holds no http(s) URL: set it where the"
                " launcher starts, or leave launcher.notify.webhook_env out"
            )
        try:
            await post_json(self._url, webhook_body(letter), {"Idempotency-Key": letter.key})
        except WebhookError as error:
            if error.again:
                why = f"the webhook {error}"
                raise DeliveryDelayedError(why, after_s=error.after_s) from error
            raise DeliveryRefusedError(
                f"the webhook in {variable} {error}: check its URL"
            ) from error
        return ""

    async def find_thread(self, letter: Letter) -> str | None:
        return None

    async def close(self) -> None:
        """Each letter has a connection of its own."""


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
