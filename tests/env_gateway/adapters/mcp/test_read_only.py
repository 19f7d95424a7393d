"""Read-only tools: the source that decides whether their calls may overlap."""

from typing import Any

import pytest

from flotilla_env_gateway.adapters.mcp.read_only import mark_read_only
from flotilla_env_gateway.config.backends import FleetConfig, McpServer, ToolServerConfig
from flotilla_env_gateway.ports import Tool
from flotilla_env_gateway.tools.tool_selection import COMPUTER

SETTINGS: dict[str, Any] = {"url": "http://host", "read_only_tools": ("listed",)}


@pytest.mark.parametrize("kind", [McpServer, FleetConfig])
@pytest.mark.parametrize(
    ("trust", "parallel"),
    [("off", set[str]()), ("listed", {"listed"}), ("hinted", {"listed", "hinted"})],
)
def test_only_whose_word_is_trusted_makes_calls_parallel(
    kind: type[ToolServerConfig], trust: str, parallel: set[str]
) -> None:
    config = kind.model_validate({**SETTINGS, "parallel_reads": trust})
    hints = {"listed": False, "hinted": True, COMPUTER: True, "plain": False}
    tools = [Tool(name, "", "{}", read_only=hint) for name, hint in hints.items()]
    marked = [mark_read_only(tool, config) for tool in tools]
    assert {tool.name for tool in marked if tool.parallel} == parallel
    assert {tool.name for tool in marked if tool.read_only} == {"listed", "hinted", COMPUTER}


def test_nothing_is_parallel_unless_the_settings_allow_it() -> None:
    assert McpServer(url="http://host").parallel_reads == "off"
