"""The conversation of an attempt as messages, each with its tokens; built while it is played."""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from services.common.domain.messages import (
    MOST_TEXT,
    MOST_TOOLS_BYTES,
    ChatCall,
    ChatMessage,
    MessageText,
    TokenText,
    encode_messages,
)
from services.rollout.dialects.inert_text import InertText
from services.rollout.dialects.tool_reply_text import MALFORMED
from services.rollout.dialects.turns import DONE, ParseError, Reply, ToolCall, Turn
from services.rollout.ports import Dialect
from services.rollout.tokenizer_port import TemplateError, Tokenizer
from services.rollout.types import Tool

# Keeps a text as media at a token; returns its hash.
KeepText = Callable[[str, int], str]


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
        name = MALFORMED if isinstance(item, ParseError) else item.name if item else ""
        found = (call_id for called, call_id in self._called if called is item)
        self.messages.append(
            ChatMessage(
                "user" if item is None and as_user else "tool",
                self.end if isinstance(content, str) else content.end,
                content,
                call_id=_utf8(next(found, "")),
                name=_utf8(name),
                outcome=reply.outcome,
                media=tuple(media),
            )
        )

    def encode(self, tokens: int) -> bytes:
        """Encode the messages of a sequence of so many tokens: a window may have cut it, or it may
        end with the start of a turn that was never played, which the last message takes."""

        def clip(text: MessageText) -> MessageText:
            if isinstance(text, str) or text.end <= tokens:
                return text
            return TokenText(min(text.start, tokens), tokens, text.skip)

        found = [
            replace(
                each,
                end=min(each.end, tokens),
                content=clip(each.content),
                thinking=clip(each.thinking),
            )
            if each.end > tokens
            else each
            for each in self.messages
        ]
        if found:
            found[-1] = replace(found[-1], end=tokens)
        return encode_messages(found)


class MessageReader:
    """Reader of the messages in what a dialect has rendered and a policy has sampled."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._inert = InertText(tokenizer.structure_tokens)
        tokens = sorted(map(re.escape, tokenizer.structure_tokens), key=len, reverse=True)
        mark = f"(?:{'|'.join(tokens) or '(?!)'})"
        # The start of a message at the end of a text, and at its start: marks, some of which have
        # the name of the role between or behind them.
        self._opening = re.compile(rf"{mark}\s*(?:\w+\s*{mark}?)?\s*\Z")
        self._header = re.compile(rf"\A(?:{mark}|\s)*(?:[a-z_]+(?:\n|{mark}))?\s*")
        self._closing = re.compile(rf"(?:{mark}|\s)+\Z")
        self._mark = re.compile(mark)

    def read_prompt(self, ids: Sequence[int], task: str) -> list[ChatMessage]:
        """Return the messages of a prompt: the task, after what the template or the dialect says
        before it, if it does. Raises TemplateError."""
        spelled = _Spelled(self._tokenizer, ids)
        task = self._inert.clean_text(task).strip()
        before = spelled.text[: max(spelled.text.rfind(task), 0)]
        # The template may write something of its own into the message, before the task.
        marks = [mark.end() for mark in self._mark.finditer(before)]
        opening = self._opening.search(before, 0, marks[-1]) if marks else None
        begin = opening.start() if opening else 0
        said = self._closing.sub("", self._header.sub("", before[:begin]))
        found = list[ChatMessage]()
        if said:
            content = spelled.find(said)
            end = 0 if isinstance(content, str) else content.end
            by_template = self._dialect.template_shows_tools
            found.append(ChatMessage("system", end, content, by_template=by_template))
        spelled.at = begin
        content = spelled.find(task)
        end = len(ids) if isinstance(content, str) else content.end
        return [*found, ChatMessage("user", end, content)]

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
        end = len(ids) - (bool(ids) and ids[-1] in self._dialect.stop_ids)
        thought = self._find_thought(ids[: turn.thinking_tokens])
        body, at = ids[turn.thinking_tokens : end], start + turn.thinking_tokens
        spoken = self._tokenizer.decode(body).strip()
        content: MessageText = TokenText(at, start + end) if spoken else ""
        media: tuple[str, ...] = ()
        # What is no readable call is content, marks included.
        malformed = any(isinstance(item, ParseError) for item in turn.items)
        written = spoken.replace(DONE, "").strip()
        answer = self._dialect.thinking.strip_marks(turn.answer)
        if not malformed and written != answer and (turn.items or answer):
            content, media = place_text(self._find_sampled(body, answer), at, keep)
        thinking, more = place_text(thought, start, keep)
        return ChatMessage("assistant", start + len(ids), content, thinking, media=(*media, *more))

    def _find_thought(self, ids: Sequence[int]) -> MessageText:
        """Return the text of a thinking of these tokens, without its marks."""
        thinking = self._dialect.thinking
        begin, end = thinking.find_text(ids)
        marked = self._tokenizer.decode(ids[begin:end]).strip()
        text = thinking.strip_marks(marked)
        if text == marked:
            return TokenText(begin, end) if text else ""
        return self._find_sampled(ids, text)

    def _find_sampled(self, ids: Sequence[int], text: str) -> MessageText:
        try:
            return _Spelled(self._tokenizer, ids).find(text)
        except TemplateError:
            # Half of a character, which the policy may write.
            return _utf8(text)

    def find_replies(self, ids: Sequence[int], replies: Sequence[Reply]) -> list[MessageText]:
        """Return the texts of replies in the tokens of an observation. Raises TemplateError."""
        spelled = _Spelled(self._tokenizer, ids)
        texts = [self._inert.clean_text(self._dialect.reply_text(reply)) for reply in replies]
        return [spelled.find(text) for text in texts]


class _Spelled:
    """The text of some tokens, and where in it each starts; none if they are not the tokens that
    the tokenizer makes of the text. Raises TemplateError."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self.text = tokenizer.decode(ids)
        self._starts = tokenizer.token_starts(self.text)
        # Where the next text is sought.
        self.at = 0

    def find(self, text: str) -> MessageText:
        """Return the tokens that spell a text behind the last found one, or the text if none do,
        without space around it."""
        text, starts = text.strip(), self._starts
        at = self.text.find(text, self.at)
        if not text or at < 0 or len(starts) != len(self._ids):
            return _utf8(text)
        self.at = at + len(text)
        # Tokens of one character all start with it.
        first = bisect_left(starts, starts[bisect_right(starts, at) - 1])
        last = bisect_left(starts, self.at)
        end = starts[last] if last < len(starts) else len(self.text)
        found = TokenText(first, last, at - starts[first], end - self.at)
        spelled = found.read(self._ids, self._tokenizer.decode)
        return found if spelled == text else _utf8(text)


def place_text(
    text: MessageText, start: int, keep: KeepText
) -> tuple[MessageText, tuple[str, ...]]:
    """Return a text found in tokens that begin at `start` as a message holds it, and what is kept
    as media: a long text that is in no token."""
    if isinstance(text, TokenText):
        return TokenText(text.start + start, text.end + start, text.skip, text.drop), ()
    kept = (keep(text, start),) if len(text) > MOST_TEXT else ()
    return _utf8(text[:MOST_TEXT]), kept


def _utf8(text: str) -> str:
    """Replace halves of characters, which no message can hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()
