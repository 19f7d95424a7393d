"""Read-only tools, by the settings and, if these trust them, by the server's hints."""

from collections.abc import Sequence
from dataclasses import replace

from flotilla_common.text.parsing import run_aside
from flotilla_env_gateway.config.backends import ToolServerConfig
from flotilla_env_gateway.ports import Tool
from flotilla_env_gateway.tools.tool_selection import COMPUTER

# Marking a tool takes as long as parsing so many bytes.
_TOOL_BYTES = 500


async def mark_tools(tools: Sequence[Tool], config: ToolServerConfig) -> Sequence[Tool]:
    """Return all tools of a server marked, off the event loop if they are many."""
    size = len(tools) * _TOOL_BYTES
    return await run_aside(size, lambda: [mark_read_only(tool, config) for tool in tools])


def mark_read_only(tool: Tool, config: ToolServerConfig) -> Tool:
    """Return a tool marked by the settings in addition to the server's hints."""
    listed = tool.name in config.read_only_tools
    # One call of the screen's tool may only look, and the next one click.
    trusted = (
        tool.name != COMPUTER
        and {
            "off": False,
            "listed": listed,
            "hinted": listed or tool.read_only,
        }[config.parallel_reads]
    )
    return replace(tool, read_only=listed or tool.read_only, parallel=trusted)
