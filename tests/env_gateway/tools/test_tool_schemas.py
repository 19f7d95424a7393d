"""Schemas that no reader of a tool could read."""

import json
from typing import Any

import pytest

from flotilla_env_gateway.ports import BackendError
from flotilla_env_gateway.tools.tool_schemas import dump_schema


def of_argument(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"size": schema}}


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (True, "is no object"),
        (None, "is no object"),
        ([], "is no object"),
        ({"type": 5}, "has the type 5"),
        (of_argument({"type": 5}), "has the type 5"),
        (of_argument({"type": [["string"]]}), r'has the type \[\["string"\]\]'),
        (of_argument({"type": {"any": 1}}), "has the type {"),
        ({"properties": ["size"]}, r'has properties \["size"\]'),
        (of_argument("string"), 'has "string" in place of a schema'),
        (of_argument({"enum": "small"}), 'has enum "small"'),
        (of_argument({"anyOf": {"type": "string"}}), "has anyOf {"),
        (of_argument({"anyOf": [{"type": "string"}, {"type": 1}]}), "has the type 1"),
        (of_argument({"items": {"items": [{"type": True}]}}), "has the type true"),
        ({"$defs": {"Size": {"type": []}, "Odd": 1}}, "has 1 in place of a schema"),
        ({"required": "size"}, 'has required "size"'),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused_by_the_name_of_its_tool(
    schema: Any, fault: str
) -> None:
    with pytest.raises(BackendError, match=f"schema of the tool 'buy' {fault}") as caught:
        dump_schema("buy", schema)
    assert caught.value.invalid
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": None, "required": None},
        of_argument({"type": "String"}),
        of_argument({"type": ["string", "null"], "description": None}),
        of_argument(True),
        of_argument({"items": [{"type": "string"}, False]}),
        of_argument({"$ref": "#/$defs/Size"}) | {"$defs": {"Size": {"enum": ["1", 2, None]}}},
        {"properties": {"type": {"type": "string"}, "enum": {}, "properties": {}}},
    ],
)
def test_what_servers_write_passes_unchanged(schema: dict[str, Any]) -> None:
    assert json.loads(dump_schema("buy", schema)) == schema


def test_a_tool_without_arguments_takes_an_object() -> None:
    assert json.loads(dump_schema("buy", {})) == {"type": "object"}
