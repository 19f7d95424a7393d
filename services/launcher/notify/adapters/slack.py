"""Messages in Slack: one thread per run, by chat.postMessage."""

import logging
import ssl
from functools import cache
from typing import Any

import httpx

from services.common.log import add_secret
from services.launcher.adapters.http_answers import ask, object_of, retry_after
from services.launcher.notify.messages import Kind, Message
from services.launcher.notify.outbox import Letter, Target
from services.launcher.notify.sinks import LaterError, RefusedError

_TIMEOUT_S = 10.0
_TOO_MANY_REQUESTS = 429
# Messages that are looked through for one that may have arrived.
_LOOK_BACK = 200
_LOOK_BACK_S = 60.0
_EVENT_TYPE = "flotilla_run"
_SIGNS = {
    Kind.STARTED: "🚀",
    Kind.RESUMED: "🔁",
    Kind.COMPLETED: "✅",
    Kind.FAILED: "❌",
    Kind.STOPPED: "⚠️",
    Kind.BUDGET: "💰",
    Kind.ALARM: "⚠️",
    Kind.NOTICE: "💡",
    Kind.LEAK_SUSPECTED: "🚨",
}
_PASSING = {"internal_error", "fatal_error", "service_unavailable", "request_timeout"}
_TOKEN = {"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired"}
_CHANNEL = {"channel_not_found", "not_in_channel", "is_archived"}
# A thread is CHANNEL:TS. Slack finds replies by the channel's id, whatever name it was given.
_SEPARATOR = ":"


class Slack:
    """Implements `Sink`.

    A message carries its key as metadata. Where the bot may read the channel (channels:history)
    and the channel is given by its id, a message that may have arrived is found again by that.
    """

    def __init__(self, target: Target, token: str) -> None:
        self._target = target
        self._token = token
        add_secret(token)
        # Its lines say no more than ours.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._client = httpx.AsyncClient(
            base_url=target.address,
            timeout=_TIMEOUT_S,
            verify=trusted(),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    async def send(self, letter: Letter) -> str:
        channel, _, parent = letter.thread.partition(_SEPARATOR)
        body: dict[str, Any] = {
            "channel": channel or self._target.channel,
            "text": text_of(letter.message),
            "unfurl_links": False,
            "metadata": {"event_type": _EVENT_TYPE, "event_payload": {"key": letter.key}},
        }
        if parent:
            body["thread_ts"] = parent
        answer = await self._call("chat.postMessage", json=body)
        match answer:
            case {"channel": str(where), "ts": str(ts)}:
                return letter.thread or f"{where}{_SEPARATOR}{ts}"
            case _:
                raise LaterError("Slack does not say where the message is", unsure=True)

    async def find(self, letter: Letter) -> str | None:
        channel, _, parent = letter.thread.partition(_SEPARATOR)
        asked: dict[str, Any] = {
            "channel": channel or self._target.channel,
            "include_all_metadata": True,
            "limit": _LOOK_BACK,
            "oldest": f"{letter.created - _LOOK_BACK_S:.6f}",
        }
        method = "conversations.replies" if parent else "conversations.history"
        if parent:
            asked["ts"] = parent
        try:
            answer = await self._call(method, params=asked)
        except RefusedError:
            # It may write there and not read: twice is better than never.
            return None
        messages = answer.get("messages")
        for message in messages if isinstance(messages, list) else ():
            match message:
                case {"ts": str(ts), "metadata": {"event_payload": {"key": letter.key}}}:
                    return letter.thread or f"{asked['channel']}{_SEPARATOR}{ts}"
                case _:
                    continue
        return None

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, **request: Any) -> dict[str, Any]:
        if not self._token:
            raise RefusedError(
                f"the environment variable {self._target.secret_env} is empty: set it to the token"
                " of a Slack bot (xoxb-...) where the launcher starts, or set"
                " launcher.notify.disable_slack"
            )
        verb = "POST" if "json" in request else "GET"
        try:
            answer = await ask(self._client, verb, f"/{method}", **request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise LaterError(f"Slack cannot be reached: {type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise LaterError(f"Slack: {type(error).__name__}", unsure=True) from error
        return await self._judged(answer)

    async def _judged(self, answer: httpx.Response) -> dict[str, Any]:
        if answer.status_code == _TOO_MANY_REQUESTS:
            raise LaterError("Slack limits the rate", after_s=retry_after(answer))
        if answer.is_server_error:
            raise LaterError(f"Slack answered HTTP {answer.status_code}", unsure=True)
        try:
            said = await object_of(answer)
        except ValueError:
            said = dict[str, Any]()
        if said.get("ok"):
            return said
        error = str(said.get("error") or f"http_{answer.status_code}")
        if error == "ratelimited":
            raise LaterError("Slack limits the rate", after_s=retry_after(answer))
        if error in _PASSING:
            raise LaterError(f"Slack: {error}", unsure=True)
        raise RefusedError(self._fix(error))

    def _fix(self, error: str) -> str:
        target = self._target
        if error in _TOKEN:
            return (
                f"Slack refuses the token in {target.secret_env} ({error}): set it to the token of"
                " a bot (xoxb-...) where the launcher starts, and start the launcher anew"
            )
        if error in _CHANNEL:
            return (
                f"Slack has no channel {target.channel!r} for this bot ({error}): invite the bot"
                " there, and give the channel's id in launcher.notify.slack.channel"
            )
        if error == "missing_scope":
            return "Slack: the bot lacks a permission: give it chat:write (and channels:history)"
        return f"Slack refuses the message ({error})"


@cache
def trusted() -> ssl.SSLContext:
    """Reading the certificates of the world's authorities takes a while; once is enough."""
    return httpx.create_ssl_context()


def text_of(message: Message) -> str:
    """In Slack's markup."""
    lines = [f"{_SIGNS[message.kind]} *{_escape(message.title)}*"]
    lines += [f"*{_escape(label)}:* {_escape(value)}" for label, value in message.facts]
    if message.text:
        lines.append(_escape(message.text))
    if message.log:
        fenced = _escape(message.log.replace("```", "'''"))
        lines.append(f"```{fenced}```")
    return "\n".join(lines)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
