"""Messages in Slack: one thread per run, by chat.postMessage."""

from typing import Any

import httpx

from flotilla_common.adapters.bounded_http import ask, object_of, open_client, retry_after
from flotilla_launcher.notify.messages import Message, MessageKind
from flotilla_launcher.notify.outbox import DeliveryTarget, Letter
from flotilla_launcher.notify.sinks import DeliveryDelayedError, DeliveryRefusedError

_TIMEOUT_S = 10.0
_TOO_MANY_REQUESTS = 429
# Number of messages, and the time before a letter, that are searched for it.
_LOOK_BACK = 200
_LOOK_BACK_S = 60.0
_EVENT_TYPE = "flotilla_run"
_SIGNS = {
    MessageKind.STARTED: "🚀",
    MessageKind.RESUMED: "🔁",
    MessageKind.COMPLETED: "✅",
    MessageKind.FAILED: "❌",
    MessageKind.STOPPED: "⚠️",
    MessageKind.BUDGET: "💰",
    MessageKind.ALARM: "⚠️",
    MessageKind.NOTICE: "💡",
    MessageKind.LEAK_SUSPECTED: "🚨",
}
_PASSING = {"internal_error", "fatal_error", "service_unavailable", "request_timeout"}
_TOKEN = {"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired"}
_CHANNEL = {"channel_not_found", "not_in_channel", "is_archived"}
# A thread is CHANNEL:TS. Slack finds replies by the channel's id, whatever name it was given.
_SEPARATOR = ":"


class SlackSink:
    """Sink that posts to Slack.

    A message carries its key as metadata, by which it is found again if the bot may read the
    channel (channels:history) and the channel is given by its id."""

    def __init__(self, target: DeliveryTarget, token: str) -> None:
        self._target = target
        self._token = token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = open_client(token, _TIMEOUT_S, base_url=target.address, headers=headers)

    async def send_letter(self, letter: Letter) -> str:
        channel, _, parent = letter.thread.partition(_SEPARATOR)
        body: dict[str, Any] = {
            "channel": channel or self._target.channel,
            "text": slack_text(letter.message),
            "unfurl_links": False,
            "metadata": {"event_type": _EVENT_TYPE, "event_payload": {"key": letter.key}},
        }
        if parent:
            body["thread_ts"] = parent
        answer = await self._call_api("chat.postMessage", json=body)
        match answer:
            case {"channel": str(where), "ts": str(ts)}:
                return letter.thread or f"{where}{_SEPARATOR}{ts}"
            case _:
                raise DeliveryDelayedError("Slack returned no location of the message", unsure=True)

    async def find_thread(self, letter: Letter) -> str | None:
        channel, _, parent = letter.thread.partition(_SEPARATOR)
        query: dict[str, Any] = {
            "channel": channel or self._target.channel,
            "include_all_metadata": True,
            "limit": _LOOK_BACK,
            "oldest": f"{letter.created - _LOOK_BACK_S:.6f}",
        }
        method = "conversations.replies" if parent else "conversations.history"
        if parent:
            query["ts"] = parent
        try:
            answer = await self._call_api(method, params=query)
        except DeliveryRefusedError:
            # The bot may lack the right to read: twice is better than never.
            return None
        messages = answer.get("messages")
        for message in messages if isinstance(messages, list) else ():
            match message:
                case {"ts": str(ts), "metadata": {"event_payload": {"key": letter.key}}}:
                    return letter.thread or f"{query['channel']}{_SEPARATOR}{ts}"
                case _:
                    continue
        return None

    async def close(self) -> None:
        await self._client.aclose()

    async def _call_api(self, method: str, **request: Any) -> dict[str, Any]:
        if not self._token:
            raise DeliveryRefusedError(
                f"the environment variable {self._target.secret_env} is empty: set it to the token"
                " of a Slack bot (xoxb-...) where the launcher starts, or set"
                " launcher.notify.disable_slack"
            )
        verb = "POST" if "json" in request else "GET"
        try:
            answer = await ask(self._client, verb, f"/{method}", **request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise DeliveryDelayedError(
                f"Slack cannot be reached: {type(error).__name__}"
            ) from error
        except httpx.HTTPError as error:
            raise DeliveryDelayedError(f"Slack: {type(error).__name__}", unsure=True) from error
        return await self._judge_answer(answer)

    async def _judge_answer(self, answer: httpx.Response) -> dict[str, Any]:
        if answer.status_code == _TOO_MANY_REQUESTS:
            raise DeliveryDelayedError("Slack limits the rate", after_s=retry_after(answer))
        if answer.is_server_error:
            raise DeliveryDelayedError(f"Slack answered HTTP {answer.status_code}", unsure=True)
        try:
            result = await object_of(answer)
        except ValueError:
            result = dict[str, Any]()
        if result.get("ok"):
            return result
        error = str(result.get("error") or f"http_{answer.status_code}")
        if error == "ratelimited":
            raise DeliveryDelayedError("Slack limits the rate", after_s=retry_after(answer))
        if error in _PASSING:
            raise DeliveryDelayedError(f"Slack: {error}", unsure=True)
        raise DeliveryRefusedError(self._fix_for(error))

    def _fix_for(self, error: str) -> str:
        target = self._target
        if error in _TOKEN:
            return (
                f"Slack refuses the token in {target.secret_env} ({error}): set it to the token of"
                " a bot (xoxb-...) where the launcher starts, and restart the launcher"
            )
        if error in _CHANNEL:
            return (
                f"Slack has no channel {target.channel!r} for this bot ({error}): invite the bot"
                " there, and give the channel's id in launcher.notify.slack.channel"
            )
        if error == "missing_scope":
            return "Slack: the bot lacks a permission: give it chat:write (and channels:history)"
        return f"Slack refuses the message ({error})"


def slack_text(message: Message) -> str:
    """Format a message in Slack's markup."""
    lines = [f"{_SIGNS[message.kind]} *{_escape_markup(message.title)}*"]
    lines += [
        f"*{_escape_markup(label)}:* {_escape_markup(value)}" for label, value in message.facts
    ]
    if message.text:
        lines.append(_escape_markup(message.text))
    if message.log:
        fenced = _escape_markup(message.log.replace("```", "'''"))
        lines.append(f"```{fenced}```")
    return "\n".join(lines)


def _escape_markup(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
