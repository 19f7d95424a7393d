"""The messages of a sequence: who said what with which of its tokens.

    messages = decode_messages(sequence.messages)
    start = 0
    for message in messages:
        print(message.role, decode(sequence.token_ids[start : message.end]))
        start = message.end

They travel and are stored encoded, as JSON: only people and exports read them. A message covers the
tokens from the end of the one before it to its own `end`, so messages cover all tokens of a
sequence exactly once, in order. A template's text between two messages belongs to the later one,
and the start of a turn to the turn."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import msgspec

# Limits of one sequence. A longer text that is no token is kept as media.
MOST_MESSAGES = 16_384
MOST_MESSAGES_BYTES = 4 * 2**20
MOST_TEXT = 4_096
MOST_TOOLS_BYTES = 512 * 1024

ChatRole = Literal["system", "developer", "user", "assistant", "tool"]


class TokenText(
    msgspec.Struct,
    frozen=True,
    gc=False,
    array_like=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The text of the tokens [start, end) of a sequence, without its first `skip` and its last
    `drop` characters: the first and the last token may spell some of a template's text too."""

    start: int
    end: int
    skip: int = 0
    drop: int = 0

    def read(self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text, without space around it, in the tokens of its sequence."""
        text = decode(token_ids[self.start : self.end])
        return text[self.skip : len(text) - self.drop].strip()


# A text in tokens, or one that is in none.
MessageText = TokenText | str


class MessagesError(ValueError):
    """The messages of a sequence are malformed, or do not fit its tokens."""


class ChatCall(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True
):
    """A well-formed call in a policy's message; `arguments` are a JSON object, as executed.

    A call that a limit or the end of the attempt left out has no tool message with its `id`."""

    id: str
    name: str
    arguments: str


class ChatMessage(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True
):
    """One message. It has no tokens if `end` is that of the message before it: a tool's result
    after which the policy wrote nothing, for instance.

    A tool's message has the `call_id` of the call that it answers, or a `name` if it answers none,
    and its `outcome` unless that is "ok". `media` are hashes of items that it shows, such as
    screenshots, and of texts that it shows in part. `by_template` is True if a chat template wrote
    it by itself, usually about the tools."""

    role: ChatRole
    end: int
    content: MessageText = ""
    thinking: MessageText = ""
    calls: tuple[ChatCall, ...] = ()
    call_id: str = ""
    name: str = ""
    outcome: str = ""
    media: tuple[str, ...] = ()
    by_template: bool = False


def shorten_message(message: ChatMessage, end: int) -> ChatMessage:
    """Return the part of a message before token `end`."""
    if message.end <= end:
        return message

    def cut(text: MessageText) -> MessageText:
        if isinstance(text, str) or text.end <= end:
            return text
        return TokenText(min(text.start, end), end, text.skip)

    return msgspec.structs.replace(
        message, end=end, content=cut(message.content), thinking=cut(message.thinking)
    )


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(tuple[ChatMessage, ...])
_TOOLS = msgspec.json.Decoder(list[dict[str, Any]])


def encode_messages(messages: Sequence[ChatMessage]) -> bytes:
    """Encode messages as a JSON array, without fields that have their default."""
    return _ENCODER.encode(messages) if messages else b""


def decode_messages(data: bytes) -> tuple[ChatMessage, ...]:
    """Return encoded messages; none for no data. Raises MessagesError."""
    if not data:
        return ()
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessagesError(f"messages: {error}") from None


def check_messages(data: bytes, begin: int, end: int, media: Iterable[str] = ()) -> None:
    """Check that the messages cover the tokens [begin, end) of a sequence with such media.

    Raises MessagesError."""
    messages = decode_messages(data)
    if len(messages) > MOST_MESSAGES:
        raise MessagesError(f"{len(messages)} messages; at most {MOST_MESSAGES}")
    at = begin
    for number, message in enumerate(messages):
        last, content = message.end, message.content
        if not at <= last <= end:
            _refuse(number, f"ends at token {last}, not within {at}..{end}")
        if type(content) is TokenText and not at <= content.start <= content.end <= last:
            _refuse(number, f"has its content in {content}, not within {at}..{last}")
        thinking = message.thinking
        if type(thinking) is TokenText and not at <= thinking.start <= thinking.end <= last:
            _refuse(number, f"has its thinking in {thinking}, not within {at}..{last}")
        if message.media and not {*message.media} <= {*media}:
            _refuse(number, "shows media that the sequence lacks")
        at = last
    if messages and at != end:
        raise MessagesError(f"messages cover tokens up to {at}; there are {end}")


def check_tools(data: bytes) -> None:
    """Check that tools are a JSON array of objects, or no data. Raises MessagesError."""
    if len(data) > MOST_TOOLS_BYTES:
        raise MessagesError(f"{len(data)} bytes of tools; at most {MOST_TOOLS_BYTES} are taken")
    try:
        _TOOLS.decode(data or b"[]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessagesError(f"tools: {error}") from None


def _refuse(number: int, problem: str) -> NoReturn:
    raise MessagesError(f"messages[{number}] {problem}")
