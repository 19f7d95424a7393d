"""Calls with unquoted arguments between tags: those that are read, and those refused."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from flotilla_rollout.dialects.argument_kinds import find_kinds
from flotilla_rollout.dialects.marked_text import TagMarker
from flotilla_rollout.dialects.turns import ParseError, ToolCall
from flotilla_rollout.dialects.written_calls import (
    INVOKES,
    KEYED,
    KEYED_OPENSOURCE,
    PARAMETERS,
    WrittenForm,
    read_block,
    read_value,
)
from tests.rollout.dialects.native_calls import TOOLS


def read(text: str, form: WrittenForm = PARAMETERS) -> Any:
    """Return the one call as a pair, or the message of the error."""
    (item,) = read_block(text, form, TOOLS)
    if isinstance(item, ParseError):
        return item.message
    return item.name, json.loads(item.arguments_json)


def note(body: str) -> str:
    return (
        "\n<function=save_note>\n<parameter=title>\nNote\n</parameter>\n"
        f"<parameter=body>\n{body}\n</parameter>\n</function>\n"
    )


SPELLINGS = {
    PARAMETERS: "<function=save_note>\n<parameter=title>\n a\n</parameter>\n"
    "<parameter=body>\nb \n</parameter>\n</function>",
    INVOKES: '\n<invoke name="save_note">\n<parameter name="title"> a</parameter>\n'
    '<parameter name="body">b </parameter>\n</invoke>\n',
    KEYED: "save_note\n<arg_key>title</arg_key>\n<arg_value> a</arg_value>\n"
    "<arg_key>body</arg_key>\n<arg_value>b </arg_value>\n",
    KEYED_OPENSOURCE: "save_note<tool_sep:opensource>\n<arg_key:opensource>title"
    "</arg_key:opensource>\n<arg_value:opensource> a</arg_value:opensource>\n<arg_key:opensource>"
    "body</arg_key:opensource>\n<arg_value:opensource>b </arg_value:opensource>\n",
}


@pytest.mark.parametrize("form", SPELLINGS)
def test_arguments_are_read_with_their_spaces(form: WrittenForm) -> None:
    assert read(SPELLINGS[form], form) == ("save_note", {"title": " a", "body": "b "})


@pytest.mark.parametrize("body", ["", "\n", "\nframed\n", "a\n\n b", " ", "<p>1 < 2</p>", "</x>"])
def test_the_lines_of_an_argument_are_its_own(body: str) -> None:
    assert read(note(body)) == ("save_note", {"title": "Note", "body": body})


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("<function=list_open>\n</function>", PARAMETERS),
        ('<invoke name="list_open">\n</invoke>', INVOKES),
        ("list_open", KEYED),
        ("list_open\n", KEYED),
        ("list_open<tool_sep:opensource>\n", KEYED_OPENSOURCE),
    ],
)
def test_a_call_may_have_no_arguments(text: str, form: WrittenForm) -> None:
    assert read(text, form) == ("list_open", {})


@pytest.mark.parametrize(
    "body",
    [
        "one </parameter> here",
        "\n</parameter>\n</function>\n",
        "<parameter=title>\nother\n</parameter>",
        "a\n<parameter=title>\nb",
    ],
)
def test_an_argument_that_spells_a_tag_is_refused_whole(body: str) -> None:
    assert "belongs to no argument" in read(note(body))


def test_text_beside_arguments_is_refused_and_quoted() -> None:
    text = "<function=list_open>really?</function>"
    assert read(text) == 'tool call has text that belongs to no argument: "really?"'


@pytest.mark.parametrize("text", ["", "list_open", "<function=list_open>", '{"name": "list_open"}'])
def test_a_block_in_another_form_is_refused(text: str) -> None:
    assert read(text) == "tool call is not in the form of this model's calls"


def test_an_argument_that_stands_twice_is_refused() -> None:
    text = "search\n<arg_key>query</arg_key><arg_value>a</arg_value>"
    twice = text + "<arg_key>query</arg_key><arg_value>b</arg_value>"
    assert read(twice, KEYED) == 'tool call has the argument "query" twice'


def test_an_argument_that_is_no_json_and_may_be_no_text_is_refused() -> None:
    text = "search\n<arg_key>limit</arg_key><arg_value>ten</arg_value>"
    assert read(text, KEYED) == 'argument "limit" of a tool call is not valid JSON: Expecting value'


def test_a_block_may_hold_several_calls_where_the_form_allows_it() -> None:
    text = '<invoke name="list_open"></invoke>\n<invoke name="list_open"></invoke>'
    assert read_block(text, INVOKES, TOOLS) == [ToolCall("list_open", "{}")] * 2


TEXT = {"type": "string"}
TEXT_OR_NOTHING = {"anyOf": [TEXT, {"type": "null"}]}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("007", TEXT, "007"),
        ("true", TEXT, "true"),
        ("null", {"type": ["string"]}, "null"),
        ("5", TEXT_OR_NOTHING, "5"),
        ("null", TEXT_OR_NOTHING, None),
        ("None", TEXT_OR_NOTHING, None),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5", {"type": "number"}, 5),
        ("9007199254740993", {"type": "integer"}, 9007199254740993),
        ("1.5", {"type": "integer"}, 1.5),
        ("True", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("true", {"type": "boolean"}, True),
        ('["a"]', {"type": "array"}, ["a"]),
        ("high", {"enum": ["low", "high"]}, "high"),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", None, 7),
        ("seven", None, "seven"),
        ("NaN", None, "NaN"),
    ],
)
def test_a_value_is_of_the_kind_that_its_schema_allows(text: str, schema: Any, value: Any) -> None:
    read = read_value(text, find_kinds(schema))
    assert (read, type(read)) == (value, type(value))


class FewTokens:
    """A tokenizer of characters, with some tags as tokens of their own."""

    control_tokens: Sequence[str] = ()
    structure_tokens: Sequence[str] = ()

    def __init__(self, *tags: str) -> None:
        self._tags = tags

    def encode(self, text: str) -> list[int]:
        return [-1 - self._tags.index(text)] if text in self._tags else [ord(each) for each in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(each) if each >= 0 else self._tags[-1 - each] for each in ids)

    def token_starts(self, text: str) -> list[int]:
        raise NotImplementedError

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        raise NotImplementedError


def test_a_tag_in_ordinary_tokens_is_data_where_the_tag_is_a_token() -> None:
    tokenizer = FewTokens("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    pieces = ["search", "<arg_key>", "query", "</arg_key>", "<arg_value>"]
    ids = [token for piece in pieces for token in tokenizer.encode(piece)]
    ids += [*map(ord, "a </arg_value> b"), *tokenizer.encode("</arg_value>")]
    assert read(TagMarker(tokenizer, KEYED.tags).mark(ids), KEYED) == (
        "search",
        {"query": "a </arg_value> b"},
    )


def test_a_tag_in_ordinary_tokens_is_a_tag_where_it_is_none() -> None:
    ids = [*map(ord, "search<arg_key>query</arg_key><arg_value>a</arg_value>")]
    assert read(TagMarker(FewTokens(), KEYED.tags).mark(ids), KEYED) == ("search", {"query": "a"})
