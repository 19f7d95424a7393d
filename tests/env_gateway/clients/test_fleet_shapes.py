"""Tools and results as FleetTaskEnv shows them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_env_gateway.clients.fleet_shapes import (
    find_tool_error,
    normalize_schema,
    to_openai_tool,
    to_tool_result,
)
from flotilla_env_gateway.ports import Media, Part, Text

PNG = Media(b"\x89PNG", "image/png", b"hash", 4)
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("parts", "result"),
    [
        ([Text('{"id": 2}')], {"id": 2}),
        ([Text("[1, 2]")], [1, 2]),
        ([Text("plain text")], "plain text"),
        ([Text("first"), Text('{"second": 2}')], ["first", '{"second": 2}']),
        ([PNG], [PNG_PART]),
        ([PNG, Text("shot")], [{"type": "text", "text": "shot"}, PNG_PART]),
        ([Media(b"\x89PNG", "", b"hash", 4)], [PNG_PART]),
        (
            [Text('{"base64_image": "data:image/jpeg;base64,/9j/"}')],
            [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/"}}],
        ),
        ([Text('{"base64_image": null}')], "Screenshot capture failed (null image)"),
        ([], []),
    ],
)
def test_a_result_has_the_recorded_shape(parts: list[Part], result: Any) -> None:
    assert to_tool_result(parts, is_error=False) == result


def test_an_error_is_its_first_text() -> None:
    assert to_tool_result([Text("not found"), Text("x")], is_error=True) == {"error": "not found"}
    assert to_tool_result([], is_error=True) == {"error": "Tool execution failed"}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"error": "no room"}, "no room"),
        ({"error": None}, None),
        ({"error": {"code": 4}}, "{'code': 4}"),
        ({"status": "failed", "message": "full"}, "full"),
        ({"status": "failed"}, "status=failed"),
        ({"status": "ok"}, None),
        ({"isError": True}, "isError=true"),
        ({"isError": False, "message": "fine"}, None),
        ("error", None),
        (["error"], None),
    ],
)
def test_errors_are_distinguished_from_results_in_all_the_ways_tools_have(
    result: Any, message: str | None
) -> None:
    assert find_tool_error(result) == message


@given(st.lists(st.text().map(Text)), st.booleans())
def test_any_texts_are_a_result(parts: list[Text], is_error: bool) -> None:
    json.dumps(to_tool_result(parts, is_error=is_error))


def test_a_tool_is_in_openais_format() -> None:
    schema = {
        "type": "object",
        "title": "Search",
        "$defs": {"City": {"type": "string"}},
        "properties": {
            "city": {"title": "City", "type": "string", "description": "Where."},
            "nights": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "box": {"prefixItems": [{"type": "integer", "title": "X"}, {"type": "integer"}]},
            "tags": {"type": "array", "items": {"type": "string", "title": "Tag"}},
            "who": {"type": "object", "properties": {"title": {"type": "string", "default": "Dr"}}},
        },
        "required": ["city"],
    }
    assert to_openai_tool("search", "Searches.", json.dumps(schema)) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "nights": {"type": "integer"},
                    "box": {"items": {"type": "integer"}},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "who": {"type": "object", "properties": {"title": {"type": "string"}}},
                },
                "required": ["city"],
            },
        },
    }


def test_a_tool_without_arguments_has_empty_properties() -> None:
    parameters = to_openai_tool("now", "", '{"type": "object"}')["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {}, "required": []}


@given(JSON)
@settings(deadline=None)
def test_any_schema_is_normalized_once_and_for_all(schema: Any) -> None:
    once = normalize_schema(schema)
    json.dumps(once)
    assert normalize_schema(once) == once
