"""Dialects of the `renderers` package: a renderer written by hand for each family of models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from renderers.base import ParsedToolCall, ToolCallParseStatus

from flotilla_rollout.adapters.renderer_choice import THINKING_FORMS, make_renderer
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.call_proof import CallProof
from flotilla_rollout.dialects.call_readers import (
    MakeReader,
    SampledTurn,
    TaggedCallReader,
    WrittenCallReader,
)
from flotilla_rollout.dialects.call_values import (
    Required,
    check_call_keys,
    make_call,
    required_arguments,
)
from flotilla_rollout.dialects.common_prefix import common_length
from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.marked_text import TagMarker
from flotilla_rollout.dialects.template import render_conversation, strip_stop
from flotilla_rollout.dialects.template_turns import THINKING_FIELD
from flotilla_rollout.dialects.text_calls import PYTHON_TAG, find_unread_call
from flotilla_rollout.dialects.thinking import ANSWER, THOUGHT, ThinkingForm, ThinkingMarks
from flotilla_rollout.dialects.tool_reply_text import (
    make_conversation,
    make_tool_messages,
    native_reply_text,
)
from flotilla_rollout.dialects.turns import (
    OK,
    Finish,
    ParseError,
    PlayedTurn,
    Reply,
    Retention,
    ToolCall,
    Turn,
    decide_end,
    total_reading,
)
from flotilla_rollout.dialects.written_calls import (
    DSML,
    INVOKES,
    KEYED,
    KEYED_OPENSOURCE,
    PARAMETERS,
)
from flotilla_rollout.tokenizer_port import TemplateError
from flotilla_rollout.types import PromptFacts, Tool

_PROBLEMS = {
    ToolCallParseStatus.INVALID_JSON: "tool call is not valid JSON",
    ToolCallParseStatus.UNCLOSED_BLOCK: "tool call has no end",
    ToolCallParseStatus.MISSING_NAME: 'tool call needs "name", the name of a tool',
    ToolCallParseStatus.MALFORMED_STRUCTURE: "tool call is not in the form of this model's calls",
}
# The package strips unquoted arguments and cuts them at the first tag that they contain.
_READERS: Mapping[str, MakeReader] = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), TaggedCallReader),
    **dict.fromkeys(
        ("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), partial(WrittenCallReader, PARAMETERS)
    ),
    **dict.fromkeys(
        ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), partial(WrittenCallReader, PARAMETERS)
    ),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), partial(WrittenCallReader, KEYED)),
    **dict.fromkeys(
        ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
        partial(WrittenCallReader, KEYED),
    ),
    "hy3": partial(WrittenCallReader, KEYED_OPENSOURCE),
    "minimax-m2": partial(WrittenCallReader, INVOKES),
    "deepseek-v4": partial(WrittenCallReader, DSML),
}
_CALLS_ARE_TEXT = frozenset({"llama-3"})
_FACTS = PromptFacts("QUESTION", "", {})
_ANSWER = "ANSWER"


class RendererDialect:
    """Dialect of one family. Raises ConfigError on options that the renderer does not accept, and
    TemplateError if the tokenizer lacks a token that the family needs, or if pictures are to be
    shown and the renderer shows none."""

    template_shows_tools = True

    def __init__(
        self,
        tokenizer: TransformersTokenizer,
        name: str,
        options: Mapping[str, Any],
        extra_stop_ids: Sequence[int] = (),
        finish: Finish = "answer",
        retention: Retention = "all",
        *,
        pictures: bool = False,
    ) -> None:
        self._finish: Finish = finish
        self._name = name
        self._renderer = make_renderer(tokenizer, name, options, retention)
        # A place for a picture is one token then, as in the chat template.
        self._unprocessed = {"process_multimodal": False} if pictures else {}
        if pictures and not getattr(self._renderer, "supports_process_multimodal", False):
            raise TemplateError(
                f"rollout.dialect.name: the renderer {name!r} shows no pictures; set"
                ' rollout.dialect.name = "template", or remove [policy.vision]'
            )
        self.stop_ids = tuple(
            dict.fromkeys([*self._renderer.get_stop_token_ids(), *extra_stop_ids])
        )
        self._inert = InertText(tokenizer.structure_tokens)
        self._tokenizer = tokenizer
        make_reader = _READERS.get(name)
        self._reader = None if make_reader is None else make_reader(tokenizer, None)
        tag = tokenizer.encode(PYTHON_TAG) if name in _CALLS_ARE_TEXT else ()
        self._python_tag = tag[0] if len(tag) == 1 else None
        start = tokenizer.decode(self.prompt_ids(_FACTS, ()))
        form = THINKING_FORMS.get(name, ThinkingForm())
        self.thinking = ThinkingMarks(tokenizer, start, self._show_thinking(), form)
        self._inert.add_tags(self._find_frame())
        said = [{"role": "user", "content": _FACTS.task}, {"role": "assistant", "content": _ANSWER}]
        plain = self._show_turn(self._render(said, (), generate=False))
        self._proof = CallProof(self._write_calls, tokenizer.structure_tokens, plain)
        self._marker = TagMarker(tokenizer, self._proof.openings)

    def _show_thinking(self) -> str:
        """Return a turn of THOUGHT and ANSWER in the family's form."""
        turn = {"role": "assistant", "content": ANSWER, THINKING_FIELD: THOUGHT}
        question = {"role": "user", "content": _FACTS.task}
        return self._tokenizer.decode(self._render([question, turn], (), generate=False))

    def _find_frame(self) -> list[str]:
        """Return the family's own text around an answer."""
        call = ToolCall("look", "{}")
        alone = self.render_turns(_FACTS, (), [PlayedTurn([call])])
        replies = [Reply(call, OK, [_ANSWER])]
        whole = self.render_turns(_FACTS, (), [PlayedTurn([call], replies)])
        shared = common_length(alone, whole)
        return self._tokenizer.decode(whole[shared:]).split(_ANSWER)

    def prompt_ids(self, facts: PromptFacts, tools: Sequence[Tool]) -> list[int]:
        return self.render_turns(facts, tools, ())

    def render_turns(
        self, facts: PromptFacts, tools: Sequence[Tool], turns: Sequence[PlayedTurn]
    ) -> list[int]:
        messages = make_conversation(facts, self._name_calls(turns), self._inert)
        return self._render(messages, tools, generate=not turns or turns[-1].is_answered)

    def render_by_template(
        self, facts: PromptFacts, tools: Sequence[Tool], turns: Sequence[PlayedTurn]
    ) -> list[int]:
        """Return the same conversation as the model's own chat template renders it."""
        named = self._name_calls(turns)
        text = render_conversation(self._tokenizer, facts, tools, named, self._inert)
        return self._tokenizer.encode(text)

    def _name_calls(self, turns: Sequence[PlayedTurn]) -> Sequence[PlayedTurn]:
        if not self._name.startswith("kimi"):
            return turns
        return [replace(turn, calls=_name_ids(turn.calls)) for turn in turns]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, generate: bool
    ) -> list[int]:
        try:
            return self._renderer.render(
                list(messages),  # pyright: ignore[reportArgumentType]
                tools=self._schemas(tools),
                add_generation_prompt=generate,
                **self._unprocessed,
            ).token_ids
        except Exception as error:
            # A renderer may raise any error.
            raise TemplateError(f"the renderer cannot render this: {error!r}") from error

    def bridge_ids(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        replies: Sequence[Reply],
        tools: Sequence[Tool],
    ) -> list[int]:
        messages = make_tool_messages(replies, self._inert)
        before, written = self._last_turn(prompt_ids), list(completion_ids)
        follows = self._continue(before, written, messages, tools)
        if follows is not None:
            return follows
        # Renderers cannot continue from an unclosed thinking, nor from every end of text: then they
        # continue from a turn that consists of an end alone.
        closed = list(self.thinking.end_ids)
        sampled = [end for end in written[-1:] if end in self.stop_ids]
        for end in dict.fromkeys([*sampled, *self.stop_ids]):
            follows = self._continue(before[:1], [*closed, end], messages, tools)
            if follows is not None:
                return follows if end in sampled else [end, *follows]
        raise TemplateError("the renderer cannot continue this turn without changing it")

    def _continue(
        self,
        before: list[int],
        written: list[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Return the tokens after a turn; None if the renderer would change the turn."""
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before,
                written,
                list(messages),  # pyright: ignore[reportArgumentType]
                tools=self._schemas(tools),
                **self._unprocessed,
            )
        except Exception as error:
            raise TemplateError(f"the renderer cannot continue this turn: {error!r}") from error
        known = before + written
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return bridged.token_ids[len(known) :]

    @total_reading
    def parse_turn(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Turn:
        ids, ended = strip_stop(completion_ids, self.stop_ids)
        thinking = self.thinking.count_tokens(ids)
        if self.thinking.is_thinking(ids):
            # Renderers take a call within it for its end.
            turn = Turn((), False, "")
        elif self._reader is not None:
            sampled = SampledTurn(ids, prompt_ids, thinking, self.thinking.is_open)
            turn = self._reader.read_turn(sampled, tools)
        else:
            turn = self._read_rendered(prompt_ids, completion_ids, thinking, tools)
            thinking = turn.thinking_tokens
        turn = replace(turn, thinking_tokens=thinking)
        return decide_end(turn, ended=ended, finish=self._finish)

    def _read_rendered(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        thinking: int,
        tools: Sequence[Tool],
    ) -> Turn:
        """Read a turn by the renderer."""
        tagged = len(completion_ids) > 0 and completion_ids[0] == self._python_tag
        parsed = self._renderer.parse_response(
            list(completion_ids[tagged:]),
            tools=self._schemas(tools),
            prompt_ids=self._last_turn(prompt_ids),
        )
        ids, _ = strip_stop(completion_ids, self.stop_ids)
        if parsed.reasoning_complete is False:
            return Turn((), False, "", len(ids))
        if parsed.reasoning_content is not None:
            thinking = self.thinking.count_tokens(ids, parsed.reasoning_content)
        required = required_arguments(tools)
        read = [_make_item(call, required, self._proof.keys) for call in parsed.tool_calls]
        text = self._marker.mark(ids[thinking:])
        items = self._proof.check(text, parsed.content, read)
        if self._name in _CALLS_ARE_TEXT and not items:
            unread = find_unread_call(parsed.content, tagged=tagged)
            items = () if unread is None else (unread,)
        return Turn(items, False, parsed.content, thinking)

    def _write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Return a turn of calls in the family's form, before its end."""
        return self._show_turn(self.render_turns(_FACTS, (), [PlayedTurn(calls)]))

    def _show_turn(self, whole: Sequence[int]) -> str:
        prompt = self.prompt_ids(_FACTS, ())
        turn = whole[common_length(prompt, whole) :]
        return self._tokenizer.decode([token for token in turn if token not in self.stop_ids])

    def reply_text(self, reply: Reply) -> str:
        return native_reply_text(reply)

    def _last_turn(self, prompt_ids: NDArray[np.int32]) -> list[int]:
        """Return the ids from the end of the previous turn: renderers look no further back."""
        ends = np.flatnonzero(np.isin(prompt_ids, self.stop_ids))
        return prompt_ids[ends[-1] if len(ends) else 0 :].tolist()

    def _schemas(self, tools: Sequence[Tool]) -> Any:
        return self._inert.tool_schemas(tools) if tools else None


def _make_item(
    call: ParsedToolCall, required: Required, known: Sequence[str]
) -> ToolCall | ParseError:
    if problem := _PROBLEMS.get(call.status):
        return ParseError(problem)
    arguments = call.arguments if call.arguments is not None else {}
    if not arguments and (wrong := check_call_keys(call.raw, call.name or "", required, known)):
        return wrong
    made = make_call({"name": call.name, "arguments": arguments}, required)
    if isinstance(made, ToolCall) and call.id:
        return ToolCall(made.name, made.arguments_json, call.id)
    return made


def _name_ids(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """Return calls with ids that name them, for families whose calls have no other name."""
    return [
        replace(call, call_id=f"functions.{call.name}:{number}")
        for number, call in enumerate(calls)
    ]
