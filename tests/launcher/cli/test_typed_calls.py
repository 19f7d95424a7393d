"""Tool calls as a person types them."""

import json
from typing import Any

import pytest

from flotilla_launcher.cli.typed_calls import parse_call

SCHEMAS: dict[str, dict[str, Any]] = {
    "book": {"properties": {"city": {"type": "string"}, "nights": {"type": "integer"}}},
    "odd": {"properties": ["city"]},
}


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("book", {}),
        ('book {"city": "Rome"}', {"city": "Rome"}),
        ('book{"city": "Rome"}', {"city": "Rome"}),
        ("book city=Rome nights=2", {"city": "Rome", "nights": 2}),
        ("book city='New York'", {"city": "New York"}),
        # What is text by the schema stays text, though it looks like a number.
        ("book city=12", {"city": "12"}),
        ("book other=[1,2] word=maybe", {"other": [1, 2], "word": "maybe"}),
        ("book city=a=b", {"city": "a=b"}),
        ("book city=", {"city": ""}),
        ("odd city=3", {"city": 3}),
        ("unknown city=true", {"city": True}),
    ],
)
def test_arguments_are_json_or_words_of_name_and_value(line: str, arguments: Any) -> None:
    call = parse_call(line, SCHEMAS)
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == (line.split("{")[0].split()[0], arguments)


def test_json_is_passed_on_as_it_was_typed() -> None:
    call = parse_call('book {"nights": }', SCHEMAS)
    assert call is not None
    # The environment refuses it, and says why.
    assert call.arguments == '{"nights": }'


@pytest.mark.parametrize(
    "line", ["", "what is this?", "book city", "book 'city=Rome", 'book {"city": "a=b"', "{}"]
)
def test_what_is_no_call_is_none(line: str) -> None:
    assert parse_call(line, SCHEMAS) is None
