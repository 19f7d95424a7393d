"""Arguments between tags are converted by the whole schema of their tool."""

import json
from enum import StrEnum
from typing import Any

import pytest
from pydantic import BaseModel

from flotilla_rollout.dialects.argument_kinds import find_argument_kinds, find_kinds
from flotilla_rollout.dialects.turns import ToolCall
from flotilla_rollout.dialects.written_calls import PARAMETERS, read_block
from flotilla_rollout.types import Tool


class Size(StrEnum):
    SMALL = "1"
    LARGE = "2"


class Order(BaseModel):
    size: Size
    other: Size | None = None


def read(value: str, parameters: dict[str, Any], key: str = "size") -> Any:
    text = f"<function=order>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
    [call] = read_block(text, PARAMETERS, [Tool("order", "", parameters)])
    assert isinstance(call, ToolCall), call
    return json.loads(call.arguments_json)[key]


def test_an_enum_of_texts_behind_a_reference_is_called_by_its_texts() -> None:
    parameters = Order.model_json_schema()
    assert "$ref" in parameters["properties"]["size"]
    assert read("1", parameters) == "1"
    assert read("2", parameters, "other") == "2"
    assert read("null", parameters, "other") is None


@pytest.mark.parametrize(
    ("value", "schema", "converted"),
    [
        ("hello", {"type": "String"}, "hello"),
        ("5", {"type": "String"}, "5"),
        ("5", {"type": "str"}, "5"),
        ("hello", {"type": "any"}, "hello"),
        ("5", {"type": "any"}, 5),
        ("5", {"const": "5"}, "5"),
        ("5", {"allOf": [{"type": "string"}, {"minLength": 1}]}, "5"),
        ("5", {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "5"),
        ("5", {"type": "string", "anyOf": [{"pattern": "a"}, {"pattern": "5"}]}, "5"),
        ("5", {"anyOf": [{"type": "string"}, {}]}, 5),
        ("5", {"$ref": "#/$defs/text"}, "5"),
        ("5", {"$ref": "#/$defs/same"}, "5"),
        ("5", {"$ref": "#/$defs/loop"}, 5),
        ("5", {"$ref": "#/nowhere"}, 5),
        ("5", {"$ref": "https://example.com/schema"}, 5),
        ("5", {"type": 5}, 5),
        ("5", {"type": [["string"]]}, 5),
        ("5", True, 5),
    ],
)
def test_a_value_is_converted_by_what_its_schema_means(
    value: str, schema: Any, converted: Any
) -> None:
    definitions = {
        "text": {"type": "string"},
        "same": {"$ref": "#/$defs/text"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
    }
    got = read(value, {"properties": {"size": schema}, "$defs": definitions})
    assert (got, type(got)) == (converted, type(converted))


def test_arguments_may_be_declared_in_parts() -> None:
    text = {"properties": {"a": {"type": "string"}}}
    parameters = {"allOf": [text], "properties": {"b": {"type": "integer"}}}
    kinds = find_argument_kinds(Tool("t", "", parameters))
    assert kinds == {"a": {"string"}, "b": {"integer"}}


def test_parts_that_contradict_each_other_allow_any_kind() -> None:
    assert find_kinds({"allOf": [{"type": "string"}, {"type": "integer"}]}) is None
