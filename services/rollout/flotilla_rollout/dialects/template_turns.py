"""A chat template's own text between one policy turn and the next."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.reply_messages import Role, ShownReply, make_reply_messages
from flotilla_rollout.dialects.thinking import ANSWER, CLOSE, THOUGHT
from flotilla_rollout.dialects.turns import PlayedTurn, ToolCall
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer

# Placeholder of a policy turn in a rendered conversation; no template changes or repeats it.
TURN = "POLICYTURN"
# The field of a message that holds its thinking.
THINKING_FIELD = "reasoning_content"
# Name of the tool that a rendered turn calls.
SAMPLE_NAME = "look_up"
SAMPLE_ARGUMENTS = {"mark": TURN}
_SAMPLE = ToolCall(SAMPLE_NAME, json.dumps(SAMPLE_ARGUMENTS))
QUESTION: Mapping[str, Any] = {"role": "user", "content": "QUESTION"}
# Numbers of consecutive replies that a template must render.
CHECKED = (1, 2, 3)
# Replies that a content-filtering template would change.
HOSTILE = (' {"a": "b\\n\\\\"}\n', "\u00e9\u4e2d\U0001f600 'x' <b>&amp;</b>", "")
# Number of cached frames: one for each order of tools called in one turn, and of their pictures.
MOST_FRAMES = 256
# Of the replies to one turn, for each the name of the tool, the id of its call and its pictures.
_Slots = tuple[tuple[str, str, int], ...]

_INSTEAD = (
    'rollout.dialect.name = "template" shows what tools answer as `tool` messages: set'
    ' rollout.dialect.name = "full", which shows it as user messages, or give the model a'
    " chat template that renders them"
)

_SHOW_PICTURES = (
    'pictures are `{"type": "image"}` parts of a message: give the model a chat template that shows'
    " them (rollout.dialect.chat_template), or remove [policy.vision]"
)


@dataclass(frozen=True, slots=True)
class _CallStyle:
    """A way to put calls into a message: all of a turn or one, arguments as object or text.

    A template that accepts none of them sees the turn as plain content."""

    all_calls: bool = True
    as_text: bool = False
    as_content: bool = False

    def make_message(self, replies: Sequence[ShownReply]) -> dict[str, Any]:
        if self.as_content:
            return {"role": "assistant", "content": TURN}
        called = replies if self.all_calls else replies[:1]
        sample = json.dumps(SAMPLE_ARGUMENTS)
        return self.show_calls([(reply.call_id, reply.name, sample) for reply in called])

    def show_calls(self, calls: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
        """Return the message of calls, each of an id, a name and arguments as JSON."""
        shown = [
            {
                "id": call_id,
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if self.as_text else json.loads(arguments),
                },
            }
            for call_id, name, arguments in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": shown}

    def count_marks(self, replies: int) -> int:
        return replies if self.all_calls and not self.as_content else 1


_CALL_STYLES = (
    _CallStyle(),
    _CallStyle(as_text=True),
    _CallStyle(all_calls=False),
    _CallStyle(all_calls=False, as_text=True),
)
_CONTENT = _CallStyle(as_content=True)


class TemplateTurns:
    """Text of one chat template from the end of a policy's turn to the start of its next.

    Replies are spliced into the template's frame if it shows them unchanged, and rendered
    otherwise. With `pad`, the token that stands for a picture, replies have pictures. Raises
    TemplateError if the template rewrites earlier turns, or cannot render the text or the pictures
    after a turn.
    """

    def __init__(self, tokenizer: Tokenizer, role: Role, inert: InertText, pad: str = "") -> None:
        self._tokenizer = tokenizer
        self._role: Role = role
        self._pad = pad
        # True if a user's message shows the pictures of tools' messages, whose template does not.
        self.pictures_apart = False
        # Several replies form one user message.
        self._counts = CHECKED if role == "tool" else CHECKED[:1]
        self._closing = find_closing_token(tokenizer, QUESTION)
        self._start = self._render([QUESTION], generate=False)
        self._style = self._choose_style()
        self._frame = lru_cache(MOST_FRAMES)(self._make_frame)
        frames = [self._frame(_sample_names(count)) for count in self._counts]
        inert.add_tags(text for frame in frames for text in frame)
        self.shows_unchanged = self._check_splices()
        if pad:
            self._choose_place_of_pictures()

    def puts_thinking_inline(self, turns: Sequence[PlayedTurn]) -> bool:
        """Return True if these turns think, and the template shows thinking only in content."""
        return any(turn.thought for turn in turns) and THOUGHT not in self.shown_thinking

    @cached_property
    def shown_thinking(self) -> str:
        """A turn of THOUGHT and ANSWER in the template's form."""
        message = {"role": "assistant", "content": ANSWER, THINKING_FIELD: THOUGHT}
        return self._render([QUESTION, message], generate=False)

    @property
    def sample_end(self) -> str:
        """The template's end of a call, before the end of the turn."""
        return self.write_calls([_SAMPLE]).rpartition(TURN)[2]

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Return a turn of calls in the template's form, before its end; empty if it writes
        none."""
        if self._style is _CONTENT:
            return ""
        message = self._style.show_calls(
            [(make_call_id(n), call.name, call.arguments_json) for n, call in enumerate(calls)]
        )
        turn = self._render([QUESTION, message], generate=False)
        prompt = self.first_turn()
        begin = len(prompt if turn.startswith(prompt) else self._start)
        follows = self.after_turn([ShownReply(SAMPLE_NAME, make_call_id(0), "")])
        ends = [token for token in self._tokenizer.control_tokens if follows.startswith(token)]
        answer = turn[begin:].rstrip().removesuffix(max(ends, key=len, default=""))
        thinking = turn[begin:].partition(calls[0].name)[0].rfind(CLOSE)
        return answer[thinking + len(CLOSE) if thinking >= 0 else 0 :].strip()

    def after_turn(self, replies: Sequence[ShownReply]) -> str:
        """Return the text after a turn, from its end-of-turn token on."""
        if not self.shows_unchanged:
            return self._render_tail(self._style, replies)
        frame = self._frame(tuple((reply.name, reply.call_id, reply.pictures) for reply in replies))
        body = "".join(before + reply.text for before, reply in zip(frame, replies, strict=False))
        return body + frame[-1]

    def first_turn(self) -> str:
        """Return a prompt with the start of the policy's first turn."""
        return self._render([QUESTION], generate=True)

    def without_closing(self, text: str) -> str:
        """Return a conversation without the token that closes it."""
        return text.removesuffix(self._closing)

    def _choose_style(self) -> _CallStyle:
        """Choose the style at the start: later, a fault would only affect attempts that get so
        far."""
        refused: list[str] = []
        for style in (*(_CALL_STYLES if self._role == "tool" else ()), _CONTENT):
            try:
                self._check_style(style)
            except TemplateError as error:
                refused.append(str(error))
            else:
                return style
        reasons = dict.fromkeys([refused[-1], refused[0]])
        raise TemplateError("; and with its calls: ".join(reasons))

    def _choose_place_of_pictures(self) -> None:
        """Find where the template shows the pictures of tools: in their own messages, else in a
        user's message after them."""
        try:
            self._frame(_sample_names(1, pictures=1))
        except TemplateError:
            self.pictures_apart = self._role == "tool"
        try:
            for count in self._counts:
                self._frame(_sample_names(count, pictures=1))
        except TemplateError as error:
            raise TemplateError(f"{error}; {_SHOW_PICTURES}") from error

    def _check_style(self, style: _CallStyle) -> None:
        for count in self._counts:
            self._split_frame(style, _sample_names(count))

    def _make_frame(self, calls: _Slots) -> tuple[str, ...]:
        return self._split_frame(self._style, calls)

    def _split_frame(self, style: _CallStyle, calls: _Slots) -> tuple[str, ...]:
        """Return the template's text around replies, beginning with the end-of-turn token."""
        replies = [
            ShownReply(name, call_id, f"OBSERVATION{number}X", pictures)
            for number, (name, call_id, pictures) in enumerate(calls)
        ]
        tail = self._render_tail(style, replies)
        given = sum(reply.pictures for reply in replies)
        if given and tail.count(self._pad) != given:
            after = ", and in a user's message after them" if self.pictures_apart else ""
            raise TemplateError(
                f"the chat template leaves out pictures in {self._role} messages{after}"
            )
        pieces: list[str] = []
        for reply in replies:
            piece, found, tail = tail.partition(reply.text)
            if not found:
                raise TemplateError(
                    f"the chat template leaves out a {self._role} message where {len(calls)}"
                    " follow a turn"
                )
            pieces.append(piece)
        return (*pieces, tail)

    def _check_splices(self) -> bool:
        """Return True if replies that filters would change come out unchanged."""
        names = _sample_names(self._counts[-1])
        replies = [
            ShownReply(name, call_id, text)
            for (name, call_id, _), text in zip(names, HOSTILE, strict=False)
        ]
        frame = self._frame(names)
        spliced = "".join(piece + reply.text for piece, reply in zip(frame, replies, strict=False))
        return spliced + frame[-1] == self._render_tail(self._style, replies)

    def _render_tail(self, style: _CallStyle, replies: Sequence[ShownReply]) -> str:
        turn = style.make_message(replies)
        marks = style.count_marks(len(replies))
        shown = make_reply_messages(replies, self._role, apart=self.pictures_apart)
        whole = self._after_marks(self._render([QUESTION, turn, *shown], generate=True), marks)
        alone = self._after_marks(self._render([QUESTION, turn], generate=False), marks)
        return whole[self._find_turn_end(whole, alone) :]

    def _after_marks(self, text: str, marks: int) -> str:
        """Return the text after the policy's turn. The text before it must be unchanged: a template
        that rewrites earlier text cannot be continued token by token."""
        pieces = text.split(TURN, marks)
        if not text.startswith(self._start) or len(pieces) != marks + 1:
            raise TemplateError("the chat template rewrites, repeats or leaves out earlier turns")
        return pieces[-1]

    def _find_turn_end(self, whole: str, alone: str) -> int:
        """Return where the turn's end begins; `alone` follows the turn if nothing comes next.

        Some families have no token for it: the next role's token ends the turn, and the last text
        in `alone` may be the end of a call."""
        ended = alone.rstrip()
        end = self._last_token(ended)
        if end and not whole.startswith(ended):
            raise TemplateError(f"the chat template does not end every turn by {end!r}")
        follows = whole[len(ended) :].lstrip()
        role_follows = follows.startswith(tuple(self._tokenizer.control_tokens))
        if role_follows and not self._has_end:
            end = ""
        if not end and not role_follows:
            raise TemplateError(
                "the chat template must end the assistant's turn by a control token of the"
                f" tokenizer, but ends it by {ended[-40:]!r} and continues with {follows[:40]!r}"
            )
        return len(ended) - len(end)

    @cached_property
    def _has_end(self) -> bool:
        """Return True if the template ends a turn of plain text with a token."""
        message = _CONTENT.make_message(())
        return bool(self._last_token(self._render([QUESTION, message], generate=False).rstrip()))

    def _last_token(self, text: str) -> str:
        """Return the control token at the end of a text; empty if there is none."""
        tokens = [token for token in self._tokenizer.control_tokens if text.endswith(token)]
        return max(tokens, key=len, default="")

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        return self.without_closing(self._tokenizer.apply_chat_template(messages, None, generate))


def advise_full(tokenizer: Tokenizer, error: TemplateError, pad: str = "") -> TemplateError:
    """Return the error with the advice to show replies as user messages, if that works."""
    try:
        TemplateTurns(tokenizer, "user", InertText(()), pad)
    except TemplateError:
        return error
    return TemplateError(f"{error}; {_INSTEAD}")


def make_call_id(number: int) -> str:
    """Return an id for the n-th call of a turn in a form that every template accepts."""
    return f"call{number:05d}"


def _sample_names(count: int, pictures: int = 0) -> _Slots:
    return tuple((SAMPLE_NAME, make_call_id(number), pictures) for number in range(count))


def find_closing_token(tokenizer: Tokenizer, question: Mapping[str, Any]) -> str:
    """Return the token that closes a conversation, which the next turn replaces; empty if there is
    none.

    Phi-3's template writes `<|endoftext|>` besides the `<|end|>` of every turn."""
    alone = tokenizer.apply_chat_template([question], None, False)
    prompt = tokenizer.apply_chat_template([question], None, True)
    ends = [token for token in tokenizer.control_tokens if alone.endswith(token)]
    end = max(ends, key=len, default="")
    replaced = prompt.startswith(alone.removesuffix(end)) and not prompt.startswith(alone)
    return end if replaced else ""
