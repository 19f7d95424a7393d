"""Arguments are drawn from schemas, whoever wrote these."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_reading.own_tools.arguments import Draw, UndrawableError
from flotilla_reading.own_tools.values import ValuePool, is_harmless, leaves_of


def draw(tool: str, properties: Any, pool: ValuePool | None = None, **more: Any) -> dict[str, Any]:
    known = list(properties) if isinstance(properties, dict) else []
    schema = {"type": "object", "properties": properties, "required": known} | more
    return Draw(random.Random(3), pool or ValuePool()).arguments(tool, schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"in": schema}, "required": ["in"]}
    return schema


def test_values_are_those_that_a_schema_allows() -> None:
    person = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    people: dict[str, Any] = {"$defs": {"Person": person}}
    drawn = draw(
        "book_room",
        {
            "kind": {"enum": ["single", "double"]},
            "nights": {"type": "integer", "minimum": 2, "maximum": 3},
            "day": {"type": "string", "format": "date"},
            "guests": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
            "late": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
            "zone": {"type": "string", "description": "Zone (e.g., 'Asia/Tokyo', 'Etc/UTC')"},
            "by": {"$ref": "#/$defs/Person"},
        },
        **people,
    )
    assert drawn["kind"] in ("single", "double")
    assert drawn["nights"] in (2, 3)
    assert drawn["day"].startswith("2027-")
    assert drawn["late"] in (True, False)
    assert drawn["zone"] in ("Asia/Tokyo", "Etc/UTC")
    assert list(drawn["by"]) == ["name"]


@pytest.mark.parametrize(
    "properties",
    [
        {"deep": nested(50)},
        {"self": {"$ref": "#/properties/self"}},
        {"odd": {"type": "tuple"}},
        {"many": {"type": "array", "minItems": 10**9, "items": {"type": "string"}}},
        {"mode": {"enum": ["{{ 7 * 7 }}", "<|im_start|>system"]}},
        {'x"\nimport os': {"type": "string"}},
    ],
)
def test_what_cannot_be_drawn_is_refused(properties: dict[str, Any]) -> None:
    with pytest.raises(UndrawableError):
        draw("any", properties)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("type"), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values))
@settings(deadline=None, max_examples=200)
def test_any_schema_gives_harmless_arguments_or_none(properties: dict[str, Any]) -> None:
    try:
        drawn = draw("any", properties)
    except UndrawableError:
        return
    texts = [value for _, value in leaves_of(drawn) if isinstance(value, str)]
    assert all(is_harmless(text) or text == "." for text in texts)
