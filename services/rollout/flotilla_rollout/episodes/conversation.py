"""The conversation of an attempt as messages, each with its tokens; built while it is played."""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flotilla_common.domain.messages import (
    MOST_MESSAGES,
    MOST_MESSAGES_BYTES,
    MOST_TEXT,
    MOST_TOOLS_BYTES,
    ChatCall,
    ChatMessage,
    MessageText,
    TokenText,
    encode_messages,
    shorten_message,
)
from flotilla_common.domain.token_authors import TURN_AUTHORS, Span
from flotilla_common.images.picture import Picture
from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.tool_reply_text import MALFORMED
from flotilla_rollout.dialects.turns import DONE, OK, ParseError, Reply, ToolCall, Turn
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

# Keeps a text as media of a token; returns its hash, "" if there are too many.
KeepText = Callable[[str, int], str]
# Text of a message that is rendered in place of another, to find what a template puts around it.
_STAND_IN = "STANDIN{}X"
# Characters from one control token to another within the header of a message, such as its role.
_MOST_HEADER = 64
# Tokens of a template before a text, and after it, that are decoded one by one.
_MOST_AROUND = 48

log = get_logger(__name__)


@dataclass(slots=True)
class Conversation:
    """Messages of one attempt so far, and the ids of the latest turn's calls."""

    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    _called: list[tuple[ToolCall | ParseError, str]] = field(
        default_factory=list[tuple[ToolCall | ParseError, str]]
    )

    @property
    def end(self) -> int:
        """Number of tokens that the messages cover."""
        return self.messages[-1].end if self.messages else 0

    def add_turn(self, message: ChatMessage, items: Sequence[ToolCall | ParseError]) -> None:
        """Add a policy's turn with its calls. Those without an id of the policy's own are
        numbered."""
        place = len(self.messages)
        self._called = [
            (item, getattr(item, "call_id", "") or f"call_{place}_{number}")
            for number, item in enumerate(items)
        ]
        calls = tuple(
            ChatCall(_utf8(name), _utf8(item.name), _utf8(item.arguments_json))
            for item, name in self._called
            if isinstance(item, ToolCall)
        )
        self.messages.append(replace(message, calls=calls))

    def add_reply(
        self, reply: Reply, content: MessageText, media: Sequence[str], *, as_user: bool
    ) -> None:
        """Add the answer to a call of the latest turn, or to a turn without one, which is a user's
        message if `as_user`."""
        item = reply.item
        found = (call_id for called, call_id in self._called if called is item)
        self.messages.append(
            ChatMessage(
                "user" if item is None and as_user else "tool",
                _end_of(content, self.end),
                content,
                call_id=_utf8(next(found, "")),
                name=MALFORMED if isinstance(item, ParseError) else "",
                outcome="" if reply.outcome == OK else reply.outcome,
                media=tuple(filter(None, media)),
            )
        )

    def encode(self, spans: Sequence[Span], media: Collection[str] = ()) -> bytes:
        """Encode the messages of a sequence of these spans and media; empty if they are more than
        are kept.

        The window may have cut the tokens of the last messages, and pictures in them. Tokens after
        them are a turn that was not played to its end, or only the start of one, which the last
        message takes."""
        if not self.messages:
            return b""
        tokens = sum(span.length for span in spans)
        found = [
            replace(
                shorten_message(each, tokens),
                media=tuple(name for name in each.media if name in media),
            )
            for each in self.messages
        ]
        turn = 0
        for span in spans:
            if span.author in TURN_AUTHORS and turn >= self.end:
                found.append(ChatMessage("assistant", tokens, TokenText(turn, tokens)))
                break
            turn += span.length
        found[-1] = replace(found[-1], end=tokens)
        data = encode_messages(found)
        if len(data) > MOST_MESSAGES_BYTES:
            # Texts that are in no token, in whole episodes of results that nobody has read.
            data = encode_messages([_without_texts(each) for each in found])
        return data if len(data) <= MOST_MESSAGES_BYTES and len(found) <= MOST_MESSAGES else b""


class MessageReader:
    """Reader of the messages in what a dialect has rendered and a policy has sampled.

    It never raises: what it cannot read is told by its raw tokens. Otherwise a fault in telling
    would cost the attempt."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._inert = InertText(tokenizer.structure_tokens)
        self._marks = tuple(tokenizer.structure_tokens)
        marks = sorted(map(re.escape, self._marks), key=len, reverse=True)
        mark = f"(?:{'|'.join(marks) or '(?!)'})"
        self._mark = re.compile(mark)
        # The start of a message: marks, with the name of the role between or behind them.
        self._opening = re.compile(rf"{mark}\s*(?:\w+\s*{mark}?)?\s*")
        self._header = re.compile(rf"(?:{mark}|\s)*(?:[a-z_]+(?:\n|{mark}))?\s*")

    def read_prompt(
        self, ids: Sequence[int], facts: PromptFacts, tools: Sequence[Tool]
    ) -> list[ChatMessage]:
        """Return the messages of a prompt: the task, after what the template or the dialect says
        before it, if it does."""
        try:
            spelled = _Spelled(self._tokenizer, ids)
            [(begin, end)] = _find_each(
                spelled.text, [self._inert.clean_text(facts.task)]
            ) or _split(spelled.text, self._frame_prompt(tools, facts.pictures), [])
            before = spelled.text[:begin]
            said = self._read_preamble(before)
            content, at = spelled.at(begin, end), before.find(said)
            system = spelled.at(at, at + len(said))
        except Exception as error:  # noqa: BLE001 - whatever it is, the attempt does not need it
            log.warning("prompt not read as messages", error=repr(error))
            return [ChatMessage("user", len(ids), TokenText(0, len(ids)))]
        by_template = self._dialect.template_shows_tools
        user = ChatMessage("user", _end_of(content, len(ids)), content)
        if not isinstance(system, TokenText):
            return [user]
        return [ChatMessage("system", system.end, system, by_template=by_template), user]

    def _frame_prompt(self, tools: Sequence[Tool], pictures: tuple[Picture, ...]) -> list[str]:
        """Return what is around a task in a prompt with pictures. Raises TemplateError."""
        stand_in = _STAND_IN.format(0)
        ids = self._dialect.prompt_ids(PromptFacts(stand_in, "", {}, pictures=pictures), tools)
        before, _, after = self._tokenizer.decode(ids).rpartition(stand_in)
        return [before, after]

    def _read_preamble(self, before: str) -> str:
        """Return what is said before the user's message; `before` ends where the task begins."""
        # The template may write something of its own into the message, before the task.
        marks = list(self._mark.finditer(before))[-3:]
        begin = 0
        for mark in marks:
            header = before[mark.start() : marks[-1].end()]
            if len(header) <= _MOST_HEADER and self._opening.fullmatch(header):
                begin = mark.start()
                break
        header = self._header.match(before[:begin])
        said = before[header.end() if header else 0 : begin].rstrip()
        while said.endswith(self._marks):
            mark = max((each for each in self._marks if said.endswith(each)), key=len)
            said = said.removesuffix(mark).rstrip()
        return said

    def encode_tools(self, tools: Sequence[Tool]) -> bytes:
        """Return the tools that the chat template was given, as JSON; empty if it was given none,
        or more than are kept."""
        if not tools or not self._dialect.template_shows_tools:
            return b""
        text = json.dumps(self._inert.tool_schemas(tools), ensure_ascii=False)
        data = text.encode(errors="replace")
        return data if len(data) <= MOST_TOOLS_BYTES else b""

    def read_turn(self, ids: Sequence[int], turn: Turn, start: int, keep: KeepText) -> ChatMessage:
        """Return a policy's turn, which begins at token `start` of the sequence, without its
        calls."""
        end = start + len(ids)
        try:
            thinking, content = self._read_parts(ids, turn)
            placed, media = place_text(content, start, keep)
            thought, more = place_text(thinking, start, keep)
        except Exception as error:  # noqa: BLE001 - as in `read_prompt`
            log.warning("turn not read as a message", error=repr(error))
            return ChatMessage("assistant", end, TokenText(start, end))
        return ChatMessage(
            "assistant", end, placed, thought, media=tuple(filter(None, (*media, *more)))
        )

    def _read_parts(self, ids: Sequence[int], turn: Turn) -> tuple[MessageText, MessageText]:
        """Return thinking and content of a turn, in its own tokens."""
        end = len(ids) - (bool(ids) and ids[-1] in self._dialect.stop_ids)
        thought, marks = ids[: turn.thinking_tokens], self._dialect.thinking
        first, last = marks.find_text(thought)
        marked = self._tokenizer.decode(thought[first:last]).strip()
        text = marks.strip_marks(marked)
        thinking = TokenText(first, last) if text == marked else self._find(thought, 0, text)
        at = turn.thinking_tokens
        spoken = self._tokenizer.decode(ids[at:end]).strip()
        # What is no readable call is content, marks included.
        malformed = any(isinstance(item, ParseError) for item in turn.items)
        answer = marks.strip_marks(turn.answer)
        raw = malformed or spoken.replace(DONE, "").strip() == answer
        if raw or not (turn.items or answer):
            return thinking if text else "", TokenText(at, end) if spoken else ""
        return thinking if text else "", self._find(ids[:end], at, answer)

    def _find(self, ids: Sequence[int], start: int, text: str) -> MessageText:
        """Return the tokens from `start` on that spell a text, or the text if none do."""
        spelled = _Spelled(self._tokenizer, ids[start:])
        at = spelled.text.find(text)
        found = spelled.at(at, at + len(text)) if text and at >= 0 else text
        return found if isinstance(found, str) else _shift(found, start)

    def find_replies(
        self,
        ids: Sequence[int],
        before: NDArray[np.int32],
        written: Sequence[int],
        replies: Sequence[Reply],
        tools: Sequence[Tool],
    ) -> list[MessageText]:
        """Return the texts of replies in `ids`, the tokens of an observation that follows a turn of
        `written` tokens."""
        shown = [self._inert.clean_text(self._dialect.reply_text(reply)) for reply in replies]
        try:
            spelled = _Spelled(self._tokenizer, ids)
            places = _find_each(spelled.text, shown)
            if not places:
                frame = self._frame_replies(before, written, replies, tools)
                places = _split(spelled.text, frame, shown, self._mark)
            return [spelled.at(begin, end) for begin, end in places]
        except Exception as error:  # noqa: BLE001 - as in `read_prompt`
            log.debug("replies not found in their tokens", error=repr(error))
            return [_utf8(text) for text in shown]

    def _frame_replies(
        self,
        before: NDArray[np.int32],
        written: Sequence[int],
        replies: Sequence[Reply],
        tools: Sequence[Tool],
    ) -> list[str]:
        """Return what is around replies in an observation. Raises TemplateError."""
        others = [
            each
            if each.item is None
            else Reply(each.item, each.outcome, [_STAND_IN.format(number), *each.pictures])
            for number, each in enumerate(replies)
        ]
        frame = list[str]()
        rest = self._tokenizer.decode(self._dialect.bridge_ids(before, written, others, tools))
        for other in others:
            piece, _, rest = rest.partition(self._dialect.reply_text(other))
            frame.append(piece)
        return [*frame, rest]


def _find_each(text: str, told: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of texts that stand in a text exactly once, in order; none if any of them
    does not."""
    places, at = list[tuple[int, int]](), 0
    for each in (each.strip() for each in told):
        begin = text.find(each, at)
        if not each or begin < 0 or text.count(each) != 1:
            return []
        at = begin + len(each)
        places.append((begin, at))
    return places


def _split(
    text: str, frame: Sequence[str], expected: Sequence[str], mark: re.Pattern[str] | None = None
) -> list[tuple[int, int]]:
    """Return the places of the texts between the pieces of a frame. Between two texts it must have
    a mark, which data cannot spell, unless the texts are the expected ones. Raises ValueError."""
    joined = "".join(piece + said for piece, said in zip(frame, expected, strict=False))
    exact = bool(expected) and joined + frame[-1] == text
    if not (text.startswith(frame[0]) and text.endswith(frame[-1])):
        raise ValueError("the frame differs")
    places, at = list[tuple[int, int]](), len(frame[0])
    for number, piece in enumerate(frame[1:-1]):
        if not exact and not (mark and mark.search(piece)):
            raise ValueError("nothing separates two replies")
        end = at + len(expected[number]) if exact else text.index(piece, at)
        places.append((at, end))
        at = end + len(piece)
    return [*places, (at, len(text) - len(frame[-1]))]


class _Spelled:
    """The text of some tokens, and which of them spell a part of it. Raises TemplateError."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self.text = tokenizer.decode(ids)

    def at(self, begin: int, end: int) -> MessageText:
        """Return the tokens of the characters [begin, end), without space around them, or the
        characters if no whole tokens spell them."""
        text = self.text[begin:end]
        begin, end = begin + len(text) - len(text.lstrip()), begin + len(text.rstrip())
        if begin >= end:
            return ""
        for locate in (self._from_both_ends, self._from_all_starts):
            found = locate(begin, end)
            if found and found.read(self._ids, self._tokenizer.decode) == self.text[begin:end]:
                return found
        return _utf8(self.text[begin:end])

    def _from_both_ends(self, begin: int, end: int) -> TokenText | None:
        """Locate a text with little around it, as most are: tokenising it again would cost more
        than anything else here."""
        decode, ids, size = self._tokenizer.decode, self._ids, len(self._ids)
        # Characters of the first tokens, and of the last.
        first, start, reached = 0, 0, len(decode(ids[:1]))
        while reached <= begin and first < min(_MOST_AROUND, size):
            first, start = first + 1, reached
            reached = len(decode(ids[: first + 1]))
        last, close = size, len(self.text)
        while size - last < _MOST_AROUND and last > first:
            after = len(decode(ids[last - 1 :]))
            if after > len(self.text) - end:
                break
            last, close = last - 1, len(self.text) - after
        if reached <= begin or size - last >= _MOST_AROUND:
            return None
        return TokenText(first, last, begin - start, close - end)

    def _from_all_starts(self, begin: int, end: int) -> TokenText | None:
        starts = self._tokenizer.token_starts(self.text)
        if len(starts) != len(self._ids):
            return None
        # Tokens of one character all start with it.
        first = bisect_left(starts, starts[bisect_right(starts, begin) - 1])
        last = bisect_left(starts, end)
        close = starts[last] if last < len(starts) else len(self.text)
        return TokenText(first, last, begin - starts[first], close - end)


def place_text(
    text: MessageText, start: int, keep: KeepText
) -> tuple[MessageText, tuple[str, ...]]:
    """Return a text found in tokens that begin at `start` as a message holds it, and what is kept
    as media: a long text that is in no token."""
    if isinstance(text, TokenText):
        return _shift(text, start), ()
    kept = (keep(text, start),) if len(text) > MOST_TEXT else ()
    return _utf8(text[:MOST_TEXT]), kept


def _shift(text: TokenText, start: int) -> TokenText:
    return TokenText(text.start + start, text.end + start, text.skip, text.drop)


def _end_of(text: MessageText, otherwise: int) -> int:
    return otherwise if isinstance(text, str) else text.end


def _without_texts(message: ChatMessage) -> ChatMessage:
    content, thinking = (
        text if isinstance(text, TokenText) else "" for text in (message.content, message.thinking)
    )
    return replace(message, content=content, thinking=thinking)


def _utf8(text: str) -> str:
    """Replace halves of characters, which no message can hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()
