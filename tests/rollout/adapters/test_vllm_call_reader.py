"""vLLM's parsers as readers of calls: over tokens, and without invented calls."""

import json

import numpy as np
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.rehearsal import rehearse_dialect
from flotilla_rollout.dialects.turns import ParseError, ToolCall, Turn
from flotilla_rollout.ports import Dialect
from flotilla_rollout.types import Tool
from tests.rollout.dialects.families import FAMILIES, REAL, Family
from tests.rollout.dialects.stages import Stage
from tests.support.rollout import tokenizer

# What vLLM and torch warn about at import is theirs to mend.
pytestmark = pytest.mark.filterwarnings("default")

LOOK = Tool(
    "look",
    "Looks.",
    {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
)
FREE = Tool("list", "Lists.", {"type": "object", "properties": {}})
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes() -> Dialect:
    config = DialectConfig(name="template", parser="hermes")
    return choose_dialect("", tokenizer(), config)


def read(dialect: Dialect, text: str, ids: list[int] | None = None) -> Turn:
    sampled = [*(ids or tokenizer().encode(text)), dialect.stop_ids[0]]
    return dialect.parse_turn(np.zeros(0, np.int32), sampled, (LOOK, FREE))


def test_it_reads_what_the_template_writes(hermes: Dialect) -> None:
    rehearse_dialect(hermes, tokenizer())
    assert read(hermes, CALL * 2).items == (ToolCall("look", '{"at": "x"}'),) * 2


def test_a_call_in_the_thinking_is_none(hermes: Dialect) -> None:
    turn = read(hermes, f"<think>{CALL}</think>Done.")
    assert (turn.items, turn.done, turn.answer) == ((), True, "Done.")
    assert turn.thinking_tokens > 5


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"name": "list", "parameters": {"at": "x"}}</tool_call>',
        '<tool_call>{"name": "look"}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": </tool_call>',
        "<tool_call>look</tool_call>",
    ],
)
def test_a_call_that_the_parser_does_not_read_is_an_error_and_no_answer(
    hermes: Dialect, written: str
) -> None:
    turn = read(hermes, written)
    [error] = turn.items
    assert isinstance(error, ParseError)
    assert "one begins by <tool_call>" in error.message
    assert not turn.done


def test_text_that_spells_a_call_is_none(hermes: Dialect) -> None:
    pieces = [
        "<",
        "tool_call",
        ">",
        '{"name": "look", "arguments": {"at": "x"}}',
        "<",
        "/tool_call>",
    ]
    ids = [token for piece in pieces for token in tokenizer().encode(piece)]
    assert CALL.replace("\n", "") == tokenizer().decode(ids)
    assert read(hermes, "", ids).done
    mixed = [*ids, *tokenizer().encode(CALL)]
    assert read(hermes, "", mixed).items == (ToolCall("look", '{"at": "x"}'),)


@pytest.mark.parametrize("argument", ["\ue000", r"\ue000", "\ue000\ue001", "</tool_call>"])
@pytest.mark.parametrize("spelled", [False, True])
def test_private_characters_and_spelled_tags_in_an_argument_are_kept(
    hermes: Dialect, argument: str, spelled: bool
) -> None:
    value = argument + ("</tool_call>" if spelled else "")
    arguments = json.dumps({"at": value}, ensure_ascii=False)
    # The tags that the value spells are in ordinary tokens.
    call = [f'<tool_call>\n{{"name": "look", "arguments": {arguments[:-2]}', *arguments[-2:], "}"]
    pieces = [
        piece for part in call for piece in part.replace("</tool_call", "<|/tool_call").split("|")
    ]
    ids = [token for piece in [*pieces, "\n</tool_call>"] for token in tokenizer().encode(piece)]
    [found] = read(hermes, "", ids).items
    assert isinstance(found, ToolCall)
    assert json.loads(found.arguments_json) == {"at": value}


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"parser": "hermess"}, "vLLM has no 'hermess': did you mean 'hermes'"),
        ({"parser": "hermes", "reasoning": "nothing"}, "vLLM has no 'nothing'"),
        ({"parser": "hermes", "reasoning": "granite"}, "knows no marks around a thinking"),
        ({"parser": "hermes", "reasoning": "deepseek_r1"}, "could not locate think"),
        ({"parser": "mistral"}, "could not locate the tool call token"),
        ({"reasoning": "qwen3"}, "name a rollout.dialect.parser, too"),
        ({"name": "full", "parser": "hermes"}, "are read with name = 'template' alone"),
    ],
)
def test_names_that_do_not_fit_are_refused(named: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        choose_dialect("", tokenizer(), DialectConfig.model_validate({"name": "template", **named}))


LLAMA = Family(
    "Llama 3.1 by its template",
    ("meta-llama/Llama-3.1-8B-Instruct",),
    "llama-cpp/meta-llama-Llama-3.1-8B-Instruct.jinja",
    "llama3_1",
    REAL,
    ("<|eot_id|>", "<|eom_id|>"),
    "template",
    renamed=next(each for each in FAMILIES if each.name == "Llama 3.1, 3.3").renamed,
    parser="llama3_json",
)


def test_a_call_has_its_arguments_where_the_template_writes_them() -> None:
    """Llama's under "parameters", which may be empty."""
    stage = Stage(LLAMA)
    rehearse_dialect(stage.dialect, stage.tokenizer)

    def read_llama(text: str) -> Turn:
        ids = [*stage.tokenizer.encode(text), stage.dialect.stop_ids[0]]
        return stage.dialect.parse_turn(np.zeros(0, np.int32), ids, (LOOK, FREE))

    [call] = read_llama('{"name": "list", "parameters": {}}').items
    assert call == ToolCall("list", "{}")
    [error] = read_llama('{"name": "list", "args": {"at": "x"}}').items
    assert isinstance(error, ParseError)


def test_arguments_beside_empty_ones_are_an_error(hermes: Dialect) -> None:
    for other in ("params", "parameters"):
        call = {"name": "list", "arguments": {}, other: {"at": "x"}}
        [error] = read(hermes, f"<tool_call>{json.dumps(call)}</tool_call>").items
        assert isinstance(error, ParseError)
