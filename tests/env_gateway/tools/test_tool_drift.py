"""Changes of tools from one episode to the next."""

from dataclasses import replace

import pytest

from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.ports import Tool
from flotilla_env_gateway.tools.tool_drift import EnvironmentChange, ToolHistory

LOOK = Tool("look", "Looks.", '{"type": "object", "required": []}', read_only=True)
BUY = Tool("buy", "Buys.", '{"type": "object"}')
SELL = Tool("sell", "Sells.", '{"type": "object"}')
ONE, TWO, THREE = (Task(key, "Shop.", "shop", env_version="v1") for key in "abc")


def told(history: ToolHistory, task: Task, *tools: Tool, version: str = "v1") -> str:
    change = history.note_listed(task, version, tools)[1]
    return str(change or "")


@pytest.mark.parametrize(
    ("after", "difference"),
    [
        ((LOOK, BUY, SELL), "added sell"),
        ((LOOK,), "removed buy"),
        ((LOOK, replace(BUY, description="Buys it.")), "changed buy"),
        ((LOOK, replace(BUY, input_schema_json='{"type": "object", "a": 1}')), "changed buy"),
        ((replace(LOOK, read_only=False), BUY), "changed look"),
        ((LOOK, SELL), "added sell; removed buy"),
    ],
)
def test_a_change_names_the_tools_that_differ(after: tuple[Tool, ...], difference: str) -> None:
    history = ToolHistory()
    assert told(history, ONE, LOOK, BUY) == ""
    assert told(history, ONE, *after) == f"under version 'v1' its tools changed: {difference}"
    assert told(history, ONE, *after) == ""


def test_an_order_of_tools_or_of_keys_is_no_change() -> None:
    history = ToolHistory()
    shuffled = replace(LOOK, input_schema_json='{"required": [], "type": "object"}')
    assert [told(history, ONE, *tools) for tools in ((LOOK, BUY), (BUY, shuffled))] == ["", ""]


def test_a_version_that_changes_is_told_with_its_tools() -> None:
    history = ToolHistory()
    unpinned = replace(ONE, env_version="")
    change = None
    for version, tools in (("v1", [LOOK]), ("v2", [LOOK]), ("v3", [LOOK, BUY])):
        change = history.note_listed(unpinned, version, tools)[1]
        if version == "v2":
            assert str(change) == "its version changed from 'v1' to 'v2'"
    assert isinstance(change, EnvironmentChange) and change.rule == "version_changed"
    assert str(change).endswith("from 'v2' to 'v3', and its tools changed: added buy")


def test_other_versions_modalities_and_servers_have_tools_of_their_own() -> None:
    history = ToolHistory()
    assert told(history, ONE, LOOK) == ""
    for field, value in (("env_version", "v2"), ("modality", "joint"), ("servers", ("other",))):
        other = replace(ONE, **{field: value})
        assert told(history, other, BUY, version=other.env_version) == ""


def test_a_new_task_shows_a_change_too() -> None:
    history = ToolHistory()
    assert told(history, ONE, LOOK) == ""
    assert "added buy; removed look" in told(history, TWO, BUY)


def test_where_tools_depend_on_the_task_a_new_task_shows_no_change() -> None:
    history = ToolHistory()
    told(history, ONE, LOOK)
    told(history, TWO, BUY)
    assert told(history, ONE, LOOK) == "", "it has its own"
    assert told(history, THREE, SELL) == ""
    assert "removed buy" in told(history, TWO, LOOK), "a task is still compared with itself"


def test_two_servers_of_different_versions_in_turn_are_told_once_each_way() -> None:
    history = ToolHistory()
    seen = [told(history, ONE, tool) for tool in (LOOK, BUY) * 8]
    assert sum(map(bool, seen)) == 2
