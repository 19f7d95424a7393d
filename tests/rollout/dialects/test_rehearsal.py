"""A dialect must be able to read its own output, or nothing is started."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.rehearsal import find_untold, rehearse_dialect
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import ParseError, ToolCall, Turn
from flotilla_rollout.tokenizer_port import TemplateError
from flotilla_rollout.types import Tool
from tests.rollout.dialects.templates import (
    CLOSED,
    GEMMA,
    NATIVE_CALLS,
    STRANGE_CALLS,
    calls_in,
    chatml,
    tokenizer_with,
)
from tests.support.rollout import dialect, tokenizer


def test_the_dialects_of_the_tiny_policy_hold() -> None:
    for name in ("template", "full"):
        rehearse_dialect(dialect(name), tokenizer())


def test_calls_that_a_template_writes_and_no_reader_reads_are_refused() -> None:
    strange = tokenizer_with(calls_in(STRANGE_CALLS))
    with pytest.raises(TemplateError) as refused:
        rehearse_dialect(TemplateDialect(strange), strange)
    message = str(refused.value)
    assert "a call that the chat template writes is not read again" in message
    assert "<call:look_up>" in message, "it shows what the template writes"
    native = tokenizer_with(calls_in(NATIVE_CALLS))
    rehearse_dialect(TemplateDialect(native), native)


def test_a_template_that_shows_no_calls_is_refused_for_native_calls_but_not_for_full() -> None:
    bare = tokenizer_with(chatml(""))
    with pytest.raises(TemplateError, match="no call is read"):
        rehearse_dialect(TemplateDialect(bare), bare)
    rehearse_dialect(FullDialect(bare), bare)
    gemma = tokenizer_with(GEMMA)
    rehearse_dialect(FullDialect(gemma), gemma)


def test_answers_that_a_template_trims_are_appended_as_it_shows_them() -> None:
    """Splices are used if they are proven equal to the template's rendering."""
    trims = chatml("").replace(
        "message.content + ", "(message.content | trim) -}}" + NATIVE_CALLS + "{{- "
    )
    trimming = tokenizer_with(trims)
    rehearse_dialect(TemplateDialect(trimming), trimming)


@pytest.mark.parametrize(
    ("hidden", "shown", "what"),
    [
        ("tool | tojson", "''", "the names of tools, the names of parameters: set"),
        ("tool | tojson", "tool.function.name", "leaves out the names of parameters: set"),
        ("tools or []", "(tools or [])[:1]", "the names of tools, the names of parameters: set"),
        ("message.content", "'Hello'", "the task, the date and the variables of the task: give"),
    ],
)
def test_a_template_that_hides_what_is_offered_is_refused_with_what_shows_it(
    hidden: str, shown: str, what: str
) -> None:
    template = calls_in(NATIVE_CALLS)
    if hidden == "message.content":
        said = "(message.content if message.role != 'user' or 'ocelot' not in message.content"
        hiding = template.replace(hidden, f"{said} else {shown})")
    else:
        assert hidden in template
        hiding = template.replace(hidden, shown)
    made = tokenizer_with(hiding)
    with pytest.raises(TemplateError, match=what) as refused:
        rehearse_dialect(TemplateDialect(made), made)
    assert ('rollout.dialect.name = "full"' in str(refused.value)) is what.endswith("set")


def test_tools_without_descriptions_are_played_and_reported() -> None:
    assert find_untold(dialect("template"), tokenizer()) == [
        "the descriptions of tools",
        "the descriptions of parameters",
    ]
    assert find_untold(dialect("full"), tokenizer()) == []


class _Forgetful(TemplateDialect):
    """A dialect whose bridge omits text."""

    def bridge_ids(self, *args: object, **named: object) -> list[int]:
        return super().bridge_ids(*args, **named)[:-1]  # pyright: ignore[reportArgumentType]


class _Inventive(TemplateDialect):
    """A dialect that reads no call."""

    def parse_turn(
        self, prompt_ids: NDArray[np.int32], completion_ids: object, tools: object
    ) -> Turn:
        return Turn((), True, "")


class _Converting(TemplateDialect):
    """A dialect that reads a text that looks like a value as that value."""

    wrong: Any = None

    def parse_turn(
        self, prompt_ids: NDArray[np.int32], completion_ids: Sequence[int], tools: Sequence[Tool]
    ) -> Turn:
        turn = super().parse_turn(prompt_ids, completion_ids, tools)
        return replace(turn, items=tuple(self._convert(item) for item in turn.items))

    def _convert(self, item: ToolCall | ParseError) -> ToolCall | ParseError:
        assert isinstance(item, ToolCall)
        read = {
            key: json.loads(value) if value == self.wrong else value
            for key, value in json.loads(item.arguments_json).items()
        }
        return ToolCall(item.name, json.dumps(read))


class _Demanding(TemplateDialect):
    """A dialect that reads no call without arguments."""

    def parse_turn(
        self, prompt_ids: NDArray[np.int32], completion_ids: Sequence[int], tools: Sequence[Tool]
    ) -> Turn:
        turn = super().parse_turn(prompt_ids, completion_ids, tools)
        items = [ParseError("no") if "{}" in repr(each) else each for each in turn.items]
        return replace(turn, items=tuple(items))


@pytest.mark.parametrize("text", ["12345", "null", "true", "[1]"])
def test_a_reader_that_makes_another_value_of_a_text_is_refused(text: str) -> None:
    converting = _Converting(tokenizer())
    converting.wrong = text
    with pytest.raises(TemplateError, match=r"is not read again: .*007.* is read"):
        rehearse_dialect(converting, tokenizer())


def test_a_reader_that_makes_a_number_of_leading_zeros_is_refused() -> None:
    class Shortening(_Converting):
        def _convert(self, item: ToolCall | ParseError) -> ToolCall | ParseError:
            assert isinstance(item, ToolCall)
            return ToolCall(item.name, item.arguments_json.replace('"007"', "7"))

    with pytest.raises(TemplateError, match=r"is not read again: .*007"):
        rehearse_dialect(Shortening(tokenizer()), tokenizer())


def test_a_reader_that_reads_no_call_without_arguments_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"list_rooms.* an error \(no\) is read"):
        rehearse_dialect(_Demanding(tokenizer()), tokenizer())


def test_a_bridge_that_differs_from_the_whole_conversation_is_refused_with_the_difference() -> None:
    with pytest.raises(TemplateError, match=r"1 answers appended .* instead of .* at token \d+"):
        rehearse_dialect(_Forgetful(tokenizer()), tokenizer())
    with pytest.raises(TemplateError, match="and no call is read"):
        rehearse_dialect(_Inventive(tokenizer()), tokenizer())


def test_a_dialect_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"there is no 'qwen33'; known: auto, template, full, .*qwen3,"
    ):
        choose_dialect("", tokenizer(), DialectConfig(name="qwen33"))


def test_a_renderer_for_another_tokenizer_is_refused() -> None:
    with pytest.raises(TemplateError, match="the tokenizer is none of 'gpt-oss'"):
        choose_dialect("", tokenizer(), DialectConfig(name="gpt-oss"))


def test_options_that_a_renderer_does_not_take_are_refused_with_those_that_it_takes() -> None:
    config = DialectConfig(name="qwen3", options={"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"enable_thinkin: .*qwen3 takes enable_thinking"):
        choose_dialect("", tokenizer(), config)


# Like Qwen3's: a thinking is shown up to the next message of a user.
_FORGETS = (
    "{%- set ns = namespace(user=0) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.user = loop.index0 %}{%- endif %}{%- endfor %}"
)
_THINKS = (
    "{%- if message.reasoning_content and loop.index0 > ns.user %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
)


def test_a_thinking_that_the_template_drops_before_a_user_is_kept_with_all_alone() -> None:
    shown = chatml("").replace(
        "+ message.content + ", "}}" + _THINKS + "{{- message.content -}}" + NATIVE_CALLS + "{{- "
    )
    thinking = tokenizer_with(_FORGETS + shown)
    rehearse_dialect(TemplateDialect(thinking), thinking, "tool_cycle")
    rehearse_dialect(FullDialect(thinking), thinking, "all")
    with pytest.raises(TemplateError) as refused:
        rehearse_dialect(FullDialect(thinking), thinking, "tool_cycle")
    assert '"tool_cycle" cannot be kept: after a turn that thinks' in str(refused.value)
    assert 'set it to "all"' in str(refused.value)


def test_a_template_that_keeps_the_newest_thinking_alone_is_refused_for_a_tool_cycle() -> None:
    """It renders one turn of a cycle correctly: the second one reveals it."""
    newest = _THINKS.replace("loop.index0 > ns.user", "loop.index0 > (messages | length) - 3")
    shown = chatml("").replace(
        "+ message.content + ", "}}" + newest + "{{- message.content -}}" + NATIVE_CALLS + "{{- "
    )
    forgets = tokenizer_with(shown)
    with pytest.raises(TemplateError, match="the chat template changes the prompt once a turn"):
        rehearse_dialect(TemplateDialect(forgets), forgets, "tool_cycle")


def test_the_retention_of_a_renderer_has_one_key() -> None:
    twice = DialectConfig(name="qwen3", options={"thinking_retention": "all"})
    with pytest.raises(ConfigError, match=r"thinking_retention: set rollout\.dialect\.retention"):
        choose_dialect("", tokenizer(), twice)
    # The option has the next message of a user drop what "all" keeps.
    opposed = {"name": "qwen3.6", "options": {"preserve_thinking": False}}
    with pytest.raises(ConfigError, match="conflicts with explicit thinking_retention='all'"):
        choose_dialect("", tokenizer(), DialectConfig.model_validate(opposed))


def test_a_token_that_closes_a_conversation_is_no_part_of_one_that_continues() -> None:
    closed = tokenizer_with(CLOSED)
    [end] = closed.encode("<|im_end|>")
    for also in ((), closed.encode("<|endoftext|>")):
        full = FullDialect(closed, also)
        rehearse_dialect(full, closed)
        assert full.stop_ids == (end, *also)
    native = tokenizer_with(
        CLOSED.replace("message.content + ", "message.content -}}" + NATIVE_CALLS + "{{- ")
    )
    rehearse_dialect(TemplateDialect(native), native)
