"""The parser is total, reads only what follows the thinking, and keeps calls in order."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_rollout.dialects.tagged_calls import parse_turn
from flotilla_rollout.dialects.turns import ParseError, ToolCall, Turn
from flotilla_rollout.types import Tool
from tests.support.examples import examples

TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<done>", "{", "}", '"', "[", "\\"]
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON_VALUES)
NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,12}", fullmatch=True)


def call(name: str, arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def tool(name: str, **schema: object) -> Tool:
    return Tool(name, "", {"type": "object", **schema})


def errors(turn: Turn) -> list[str]:
    return [item.message for item in turn.items if isinstance(item, ParseError)]


@given(st.lists(st.sampled_from(TAGS) | st.text(max_size=6)).map("".join), st.booleans())
def test_any_text_gives_a_result(text: str, thinking: bool) -> None:
    turn = parse_turn(text, thinking=thinking)
    for item in turn.items:
        assert isinstance(item, ParseError) or isinstance(json.loads(item.arguments_json), dict)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=4))
def test_well_formed_calls_come_back_in_order(calls: list[tuple[str, dict[str, object]]]) -> None:
    text = "I do this.\n" + "\n".join(call(*each) for each in calls)
    found = [item for item in parse_turn(text).items if isinstance(item, ToolCall)]
    assert [(c.name, json.loads(c.arguments_json)) for c in found] == calls


def test_calls_while_thinking_do_not_count() -> None:
    turn = parse_turn(f"<think>{call('a', {})} <done></think>{call('b', {})}")
    assert turn.items == (ToolCall("b", "{}"),)
    assert not turn.done


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        (f"<think>never closed {call('a', {})}<done>", False),
        (f"opened by the template {call('a', {})}<done>", True),
        (f"<think>one</think><think>two {call('a', {})}<done>", False),
    ],
)
def test_nothing_counts_when_the_thinking_is_never_closed(text: str, thinking: bool) -> None:
    assert parse_turn(text, thinking=thinking) == Turn((), False, "")


def test_thinking_that_the_template_opened_ends_at_its_tag() -> None:
    assert parse_turn("so</think>yes<done>", thinking=True) == Turn((), True, "yes")


@pytest.mark.parametrize("thinking", [False, True])
def test_thinking_whose_start_is_not_written_ends_at_its_tag(thinking: bool) -> None:
    text = f"so {call('a', {})}<done></think>yes"
    assert parse_turn(text, thinking=thinking) == Turn((), False, "yes")


def test_the_thinking_ends_at_the_first_tag_that_closes_it() -> None:
    text = f"<think>x</think>{call('a', {})} the tag </think> ends it <done>"
    turn = parse_turn(text)
    assert turn.items == (ToolCall("a", "{}"),)
    assert turn.done


def test_a_turn_may_think_again_between_its_calls() -> None:
    text = f"<think>1</think>{call('a', {})}<think>2 {call('x', {})}</think>{call('b', {})}"
    assert parse_turn(text).items == (ToolCall("a", "{}"), ToolCall("b", "{}"))


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<think>x</think>", "</think><think>"])
@pytest.mark.parametrize(
    ("before", "thinking"), [("", False), ("<think>why</think>", False), ("why</think>", True)]
)
def test_a_thinking_tag_in_an_argument_is_text(tag: str, before: str, thinking: bool) -> None:
    turn = parse_turn(before + call("say", {"text": tag}) + "<done>", thinking=thinking)
    assert turn == Turn((ToolCall("say", json.dumps({"text": tag})),), True, "")


def test_done_inside_arguments_is_text() -> None:
    turn = parse_turn(call("say", {"text": "<done>"}))
    assert turn.has_call
    assert not turn.done


def test_done_inside_a_malformed_call_is_text() -> None:
    assert not parse_turn('<tool_call>{"name": <done>}</tool_call>').done


def test_done_is_not_put_together_from_two_sides_of_a_call() -> None:
    assert not parse_turn(f"<do{call('a', {})}ne>").done


def test_the_answer_is_the_text_without_calls_and_done() -> None:
    assert parse_turn(f"<think>x</think>It is 4.{call('a', {})}<done>").answer == "It is 4."


def test_an_end_tag_inside_a_string_ends_nothing() -> None:
    turn = parse_turn(call("say", {"text": "a </tool_call> b"}))
    assert turn.items == (ToolCall("say", '{"text": "a </tool_call> b"}'),)


def test_a_missing_end_tag_is_tolerated_at_the_end_of_the_text() -> None:
    assert parse_turn('<tool_call>{"name": "a"} ').items == (ToolCall("a", "{}"),)


def test_a_missing_end_tag_before_other_text_is_an_error() -> None:
    turn = parse_turn('<tool_call>{"name": "a"} and so on')
    assert errors(turn) == ["expected </tool_call> after the JSON object of a tool call"]


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    turn = parse_turn(f"<tool_call>{{oops</tool_call>{call('a', {})}<tool_call>[<tool_call>")
    assert [type(item) for item in turn.items] == [ParseError, ToolCall, ParseError, ParseError]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1, 2]", "must be a JSON object"),
        ('"text"', "must be a JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3}', '"name"'),
        ('{"name": "a\\u0000b"}', '"name"'),
        ('{"name": "a\\ud800"}', '"name"'),
        ('{"name": "a", "arguments": "x"}', '"arguments"'),
        ('{"name": "a", "arguments": [1]}', '"arguments"'),
        ('{"name": "a", "arguments": {"x": ' + "9" * 8000 + "}}", "8000 digits"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "JSON cannot express"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "a", "arguments": ' + "[" * 100_000, "too deeply"),
        ('{"name": "a", "arguments": {"x": ' + '{"x":' * 100_000, "too deeply"),
        ("{'name': 'a'}", "not valid JSON"),
        ('{"name": "a", "arguments": {"x": "cut', "not valid JSON"),
    ],
)
def test_malformed_calls_become_errors_that_name_what_is_wrong(body: str, message: str) -> None:
    (error,) = errors(parse_turn(f"<tool_call>{body}</tool_call>"))
    assert message in error
    assert len(error) < 200


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('{"name": "a", "parameters": {"x": 1}}', '"parameters"'),
        ('{"name": "a", "input": {"x": 1}, "args": []}', '"input", "args"'),
        ('{"name": "a", "x": 1}', '"x"'),
        ('{"name": "a", "arguments": {}, "parameters": {"x": 1}}', '"parameters"'),
    ],
)
def test_arguments_under_another_key_are_an_error_that_names_it(body: str, found: str) -> None:
    (error,) = errors(parse_turn(f"<tool_call>{body}</tool_call>", [tool("a")]))
    assert '"arguments"' in error
    assert f"found {found}" in error


def test_arguments_under_two_keys_are_an_error() -> None:
    body = '{"name": "a", "arguments": {"x": 1}, "params": {"x": 2}}'
    (error,) = errors(parse_turn(f"<tool_call>{body}</tool_call>", [tool("a")]))
    assert "twice" in error


@pytest.mark.parametrize("arguments", ["{}", '{"x": 1}'])
def test_an_argument_beside_the_arguments_is_an_error(arguments: str) -> None:
    tool = Tool("a", "", {"properties": {"x": {"type": "integer"}, "y": {"type": "string"}}})
    body = f'{{"name": "a", "arguments": {arguments}, "y": "2"}}'
    [error] = parse_turn(f"<tool_call>{body}</tool_call>", [tool]).items
    assert isinstance(error, ParseError) and 'found "y"' in error.message


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "a", "arguments": {"x": 1, "x": 2}}',
        '{"name": "a", "arguments": {"x": {"y": 1, "y": 1}}}',
        '{"name": "a", "name": "b", "arguments": {"x": 1}}',
    ],
)
def test_two_equal_keys_are_an_error(body: str) -> None:
    [error] = parse_turn(f"<tool_call>{body}</tool_call>").items
    assert isinstance(error, ParseError) and "occurs twice in one object" in error.message


def test_what_stands_beside_the_arguments_is_ignored() -> None:
    body = '{"id": "1", "name": "a", "arguments": {"x": 1}, "note": {"y": 2}}'
    turn = parse_turn(f"<tool_call>{body}</tool_call>", [tool("a")])
    assert turn.items == (ToolCall("a", '{"x": 1}'),)


@pytest.mark.parametrize("body", ['{"name": "a"}', '{"name": "a", "id": "1", "type": "function"}'])
def test_no_arguments_at_all_are_those_of_a_tool_that_requires_none(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    optional = {"properties": {"x": {"type": "string"}}}
    for offered in ([tool("a")], [tool("a", **optional)], [tool("a", required=[])], []):
        assert parse_turn(text, offered).items == (ToolCall("a", "{}"),)
    (error,) = errors(parse_turn(text, [tool("b"), tool("a", required=["x", "y"])]))
    assert error == 'tool call of "a" needs "arguments" with "x", "y"'


def test_empty_arguments_are_the_gateways_to_judge() -> None:
    turn = parse_turn(call("a", {}), [tool("a", required=["x"])])
    assert turn.items == (ToolCall("a", "{}"),)


def test_the_other_common_key_names_are_understood() -> None:
    turn = parse_turn('<tool_call>{"tool": "a", "params": {"x": 1}}</tool_call>')
    assert turn.items == (ToolCall("a", '{"x": 1}'),)
