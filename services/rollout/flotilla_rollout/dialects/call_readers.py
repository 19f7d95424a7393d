"""Readers of each family's calls, by the names of vLLM's parsers of them.

Unlike those, they work on whole tokens: a tag in an argument is data, and an integer keeps its
digits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.dialects import written_calls
from flotilla_rollout.dialects.call_proof import CallProof
from flotilla_rollout.dialects.call_values import error_reason, make_call, required_arguments
from flotilla_rollout.dialects.marked_text import TagMarker, mend_json, mend_text
from flotilla_rollout.dialects.tagged_calls import DECODER, STRICT, THINK_END, THINK_START
from flotilla_rollout.dialects.tagged_calls import parse_turn as parse_tagged_turn
from flotilla_rollout.dialects.turns import ParseError, ToolCall, Turn
from flotilla_rollout.dialects.written_calls import WrittenForm, read_block
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import Tool

Items = Iterator[ToolCall | ParseError]


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A sampled turn, without the token that ended it.

    The first `thinking_tokens` are thinking; `opened` is True if the prompt had begun it."""

    ids: Sequence[int]
    prompt_ids: NDArray[np.int32]
    thinking_tokens: int
    opened: bool

    @property
    def answer_ids(self) -> Sequence[int]:
        """Ids after the thinking: a call inside the thinking does not count."""
        return self.ids[self.thinking_tokens :]


class CallReader(Protocol):
    """Reader of the calls in sampled tokens."""

    def read_turn(self, turn: SampledTurn, tools: Sequence[Tool]) -> Turn:
        """Read one turn. Total: any sampled tokens give a turn."""
        ...


# The proof is for readers of others.
MakeReader = Callable[[Tokenizer, CallProof | None], CallReader]


class TaggedCallReader:
    """Reader of JSON between `<tool_call>` tags."""

    def __init__(self, tokenizer: Tokenizer, proof: CallProof | None = None) -> None:
        tags = (*STRICT.ends, *STRICT.ends.values(), THINK_START, THINK_END)
        self._marker = TagMarker(tokenizer, tags)

    def read_turn(self, turn: SampledTurn, tools: Sequence[Tool]) -> Turn:
        text = self._marker.mark(turn.ids)
        read = parse_tagged_turn(text, tools, thinking=turn.opened)
        return Turn(tuple(map(_mend_item, read.items)), read.done, mend_text(read.answer))


class WrittenCallReader:
    """Reader of calls whose arguments are unquoted between tags."""

    def __init__(
        self, form: WrittenForm, tokenizer: Tokenizer, proof: CallProof | None = None
    ) -> None:
        self._form = form
        self._marker = TagMarker(tokenizer, form.tags)

    def read_turn(self, turn: SampledTurn, tools: Sequence[Tool]) -> Turn:
        text = self._marker.mark(turn.answer_ids)
        start, end = self._form.block
        answer, *blocks = text.split(start)
        items: list[ToolCall | ParseError] = []
        for block in blocks:
            inside, closed, outside = block.partition(end)
            items += read_block(inside, self._form, tools) if closed else [_NO_END]
            answer += outside
        return Turn(tuple(items), False, mend_text(answer).strip())


@dataclass(frozen=True, slots=True)
class JsonForm:
    """Form of calls in which a name and its arguments, as JSON, each follow a mark.

    `calls` may also precede a list of all calls; `closes` are marks without a meaning."""

    call: str
    arguments: str
    call_id: str | None = None
    closes: tuple[str, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        ids = () if self.call_id is None else (self.call_id,)
        return (self.call, self.arguments, *ids, *self.closes)


class JsonCallReader:
    """Reader of JSON after a mark. Raises ConfigError if the tokenizer lacks the mark."""

    def __init__(
        self, form: JsonForm, tokenizer: Tokenizer, proof: CallProof | None = None
    ) -> None:
        if len(tokenizer.encode(form.call)) != 1:
            raise ConfigError(
                f"rollout.dialect.parser: could not locate the tool call token {form.call!r} in the"
                " tokenizer"
            )
        self._form = form
        self._marker = TagMarker(tokenizer, form.tags)

    def read_turn(self, turn: SampledTurn, tools: Sequence[Tool]) -> Turn:
        text = self._marker.mark(turn.answer_ids)
        for mark in self._form.closes:
            text = text.replace(mark, "")
        answer, *calls = text.split(self._form.call)
        items = [_mend_item(item) for call in calls for item in self._read(call, tools)]
        return Turn(tuple(items), False, mend_text(answer).strip())

    def _read(self, text: str, tools: Sequence[Tool]) -> Items:
        # A list holds whole calls: in vocabularies without the mark, its text is no mark.
        listed = text.lstrip().startswith("[")
        head, marked, rest = ("", "", text) if listed else text.partition(self._form.arguments)
        if not marked and not listed:
            yield ParseError("tool call is not in the form of this model's calls")
            return
        rest = rest.lstrip()
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            reason = error_reason(error) if isinstance(error, ValueError) else "nested too deeply"
            yield ParseError(f"tool call is not valid JSON: {reason}")
            return
        if rest[end:].strip():
            yield ParseError("expected nothing after the JSON of a tool call")
            return
        name, _, call_id = head.partition(self._form.call_id or self._form.arguments)
        named = {"name": name.strip(), "arguments": value}
        for each in [named] if marked else value:
            yield _add_id(make_call(each, required_arguments(tools)), each, call_id.strip())


def _add_id(item: ToolCall | ParseError, value: object, call_id: str) -> ToolCall | ParseError:
    if not isinstance(item, ToolCall):
        return item
    written = value.get("id") if isinstance(value, dict) else None
    return ToolCall(item.name, item.arguments_json, call_id or str(written or ""))


def _mend_item(item: ToolCall | ParseError) -> ToolCall | ParseError:
    if isinstance(item, ParseError):
        return ParseError(mend_text(item.message))
    return ToolCall(mend_text(item.name), mend_json(item.arguments_json), item.call_id)


_NO_END = ParseError("tool call has no end")
_MISTRAL = JsonForm("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_DEEPSEEK_31 = JsonForm(
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    closes=(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
)
READERS: Mapping[str, MakeReader] = {
    **dict.fromkeys(
        ("qwen3_coder", "qwen3_xml"), partial(WrittenCallReader, written_calls.PARAMETERS)
    ),
    **dict.fromkeys(("glm45", "glm47"), partial(WrittenCallReader, written_calls.KEYED)),
    "minimax_m2": partial(WrittenCallReader, written_calls.INVOKES),
    "deepseek_v32": partial(WrittenCallReader, written_calls.DSML_FUNCTIONS),
    "deepseek_v4": partial(WrittenCallReader, written_calls.DSML),
    "seed_oss": partial(WrittenCallReader, written_calls.SEED_PARAMETERS),
    "mistral": partial(JsonCallReader, _MISTRAL),
    "deepseek_v31": partial(JsonCallReader, _DEEPSEEK_31),
}
