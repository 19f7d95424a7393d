"""A model behind an OpenAI-compatible endpoint, which answers conversations with tools."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import httpx
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from flotilla_common.adapters.bounded_http import AnswerError, ask, object_of, retry_after
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.text.parsing import TextLimits, make_plain
from flotilla_common.text.printable_text import one_line
from flotilla_common.text.redaction import add_secret, redact
from flotilla_launcher.cli.terminal import CommandError

_ANSWERS = TextLimits(bytes=2**24, values=2**16)
_CONNECT_S = 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_PASSING = (408, 409, 425, 429)
_REASON_CHARACTERS = 300
# Of one request. A larger count is none: sums of them must fit into the ledgers of their readers.
_MOST_TOKENS = 2**40


class EndpointError(CommandError):
    """Raised when the endpoint gives no answer of its model; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of one answer: its time (a model may think for minutes), and the number and the time
    of its retries."""

    answer_s: float = 600.0
    tries: int = 5
    retries_s: float = 60.0


PATIENCE = Patience()


class RequestWatch(Protocol):
    """What watches over the requests for one turn. Every request has its `key`, so that an endpoint
    that knows such keys answers, and charges, the turn once."""

    @property
    def key(self) -> str: ...

    async def admit(self) -> None:
        """Wait until a request may be sent; called before each, retries included. What it raises
        ends the turn."""
        ...

    def hold(self, seconds: float) -> None:
        """Take note that the endpoint wants no request for so long."""
        ...


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a request and its answer, as the endpoint counts them."""

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as the model wrote it: its arguments need not be JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """One answer of the model: its `message` for the conversation, with text and calls. `cut` is
    True if it ran into a limit of tokens; `usage` is None if the endpoint does not say."""

    message: dict[str, Any]
    text: str
    calls: tuple[WrittenCall, ...]
    cut: bool
    usage: TokenUsage | None = None


class ChatEndpoint:
    """One model of an endpoint."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        model: str,
        patience: Patience,
        **sampling: float,
    ) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._patience = patience
        self._sampling = sampling
        self.model = model

    async def choose_model(self) -> None:
        """Choose the first model that the endpoint lists. Raises EndpointError."""
        listed = (await self._request("GET", "/models")).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise EndpointError(f"{self._url}/models lists no model")
        self.model = first["id"]

    async def answer_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        watch: RequestWatch | None = None,
    ) -> ModelTurn:
        """Return the model's next turn. Raises EndpointError, and what `watch` raises."""
        body = {"model": self.model, "messages": messages, **self._sampling}
        # An empty list is an error to some servers.
        offered = {"tools": tools} if tools else {}
        asked = self._request("POST", "/chat/completions", watch, json=body | offered)
        return _read_turn(await asked)

    async def _request(
        self, method: str, path: str, watch: RequestWatch | None = None, **content: Any
    ) -> dict[str, Any]:
        """Return the endpoint's JSON object. What may pass is retried: limits of the rate, failures
        of the server and of the connection. Raises EndpointError."""
        patience, url, reason = self._patience, self._url + path, ""
        until = loop_time() + patience.retries_s
        headers = {"Idempotency-Key": watch.key} if watch else {}
        for number in range(patience.tries):
            wait_s = min(_FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S)
            if watch is not None:
                await watch.admit()
            try:
                asked = ask(
                    *(self._http, method, url),
                    limits=_ANSWERS,
                    whole_s=patience.answer_s,
                    headers=headers,
                    **content,
                )
                answer = await asked
                if answer.is_success:
                    return await object_of(answer, _ANSWERS)
                reason = f"{url} answered {answer.status_code}: {answer.text[:2000]}"
                if not (answer.is_server_error or answer.status_code in _PASSING):
                    break
                if "retry-after" in answer.headers:
                    wait_s = retry_after(answer)
                    if watch is not None:
                        watch.hold(wait_s)
            except AnswerError as error:
                # It was paid for, and the next one would be the same.
                reason = f"{url}: {error}"
                break
            except httpx.HTTPError as error:
                reason = f"{url}: {str(error) or type(error).__name__}"
            except ValueError as error:
                reason = f"{url} answered what is no JSON object: {error}"
                break
            if number == patience.tries - 1 or loop_time() + wait_s > until:
                reason = f"try {number + 1}: {reason}"
                break
            # Concurrent attempts were refused together, and should not come back together.
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.2))
        raise EndpointError(one_line(redact(reason), _REASON_CHARACTERS))


@asynccontextmanager
async def open_endpoint(
    url: str,
    *,
    model: str = "",
    key: str = "",
    temperature: float | None = None,
    socket: Path | None = None,
    patience: Patience = PATIENCE,
) -> AsyncGenerator[ChatEndpoint]:
    """Connect to `model` of an endpoint, by default to the first that it lists. `url` ends before
    `/chat/completions`; `socket` is that of a server on this machine. Raises EndpointError."""
    add_secret(key)
    if not (key.isascii() and key.isprintable()):
        raise EndpointError("the key has characters that no header can have")
    transport = httpx.AsyncHTTPTransport(uds=str(socket)) if socket else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    sampling = {} if temperature is None else {"temperature": temperature}
    timeout = httpx.Timeout(patience.answer_s, connect=_CONNECT_S)
    try:
        read = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise EndpointError(f"{url}: {error}") from error
    if read.scheme not in ("http", "https") or not read.host:
        raise EndpointError(f"{url} is no URL of an endpoint, such as http://127.0.0.1:8000/v1")
    # Bounds are those of the attempts, not of the pool.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        headers=headers, timeout=timeout, transport=transport, limits=limits
    ) as http:
        endpoint = ChatEndpoint(http, url, model, patience, **sampling)
        if not model:
            await endpoint.choose_model()
        yield endpoint


def _write_object(arguments: object) -> object:
    """Write arguments that a server has already parsed."""
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class _Function(BaseModel):
    name: str
    arguments: Annotated[str | None, BeforeValidator(_write_object)] = None


class _Call(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(ge=0, le=_MOST_TOKENS)
    completion_tokens: int = Field(ge=0, le=_MOST_TOKENS)


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


def _read_turn(answer: dict[str, Any]) -> ModelTurn:
    """Read the first choice of a completion. Raises EndpointError."""
    # Halves of characters and NaN, which servers send, could neither be sent on nor written.
    answer = make_plain(answer)
    try:
        choice = _Completion.model_validate(answer).choices[0]
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        # Routers answer so, with status 200, where a model behind them has failed.
        if said := answer.get("error"):
            reason = f"it says: {json.dumps(said, ensure_ascii=False)}"
        reason = one_line(redact(reason), _REASON_CHARACTERS)
        raise EndpointError(f"its answer is no chat completion: {reason}") from None
    # Null and empty fields, which servers send, are errors to some of them when they come back.
    message = answer["choices"][0]["message"]
    kept = {name: value for name, value in message.items() if value not in (None, [])}
    calls = tuple(
        WrittenCall(call.id, call.function.name, call.function.arguments or "{}")
        for call in choice.message.tool_calls or ()
    )
    text = choice.message.content or ""
    return ModelTurn(
        {**kept, "role": "assistant"},
        text,
        calls,
        cut=choice.finish_reason == "length",
        usage=_read_usage(answer.get("usage")),
    )


def _read_usage(said: object) -> TokenUsage | None:
    try:
        usage = _Usage.model_validate(said)
    except ValidationError:
        return None
    return TokenUsage(usage.prompt_tokens, usage.completion_tokens)
