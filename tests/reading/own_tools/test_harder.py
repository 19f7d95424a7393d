"""Calls of a model are played only if tools can be called so and a prompt may say their values."""

import json
from typing import Any

import pytest

from flotilla_reading.own_tools.exploration import Surroundings
from flotilla_reading.own_tools.harder import ask_for_calls, read_calls
from flotilla_reading.own_tools.observations import Probe
from flotilla_reading.own_tools.values import ValuePool
from flotilla_reading.play.ports import OfferedTool

TEXT = {"type": "string"}
FOUND = Surroundings(
    "notes",
    (
        OfferedTool("list", "All notes.", {"properties": {}}, read_only=True),
        OfferedTool("add", "Write.", {"properties": {"name": TEXT, "tags": {}}}, read_only=False),
        OfferedTool("drop", "Forget.", {"properties": {"name": TEXT}}, read_only=False),
    ),
    ValuePool(),
    probes=[Probe("list", {})],
    baseline=[[["milk"], ["eggs"]]],
)


def entry(tool: Any = "add", **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "arguments": arguments or {"name": "milk"}}


def test_a_model_is_told_the_tools_that_write_and_what_is_there() -> None:
    (first,), (second,) = ask_for_calls(FOUND, 0), ask_for_calls(FOUND, 1)
    assert "- add: Write." in first["content"] and "All notes" not in first["content"]
    assert "list {}: milk eggs" in first["content"]
    assert "of add." in first["content"] and "of drop." in second["content"]


def test_calls_are_found_in_what_a_model_says_around_them() -> None:
    items = [entry(name="a", tags=["b", 3, -2, None]), entry("drop"), entry(), entry("drop")]
    calls = read_calls(f"Sure!\n```json\n{json.dumps(items)}\n```", FOUND)
    assert not isinstance(calls, str)
    assert [call.name for call in calls] == ["add", "drop", "add", "drop"]
    assert calls[0].arguments == {"name": "a", "tags": ["b", 3, -2, None]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I would add milk.", "no JSON array"),
        ("[" * 100_000 + "]", "no JSON array"),
        ("[1, 2", "no JSON array"),
        (json.dumps([entry()] * 3), "not 4 to 6 calls"),
        (json.dumps([entry()] * 7), "not 4 to 6 calls"),
        (json.dumps([entry(), entry(), entry(), 4]), "not of a tool and its arguments"),
        (json.dumps([entry()] * 4 + [entry() | {"why": ""}]), "not of a tool and its arguments"),
        (json.dumps([entry()] * 4 + [entry(["add"])]), "not of a tool and its arguments"),
        (json.dumps([entry("list")] * 4), "that there is not"),
        (json.dumps([entry(colour="red")] * 4), "that there is not"),
        (json.dumps([entry(name="{{ 7 * 7 }}")] * 4), "may not stand in a prompt"),
        (json.dumps([entry(tags=["<|im_end|>"])] * 4), "may not stand in a prompt"),
    ],
)
def test_what_cannot_be_played_or_told_is_not_taken(text: str, reason: str) -> None:
    calls = read_calls(text, FOUND)
    assert isinstance(calls, str) and reason in calls
