"""Read-only tools, by the settings and, if these trust them, by the server's hints."""

from dataclasses import replace

from services.env_gateway.config.backends import ToolServerConfig
from services.env_gateway.ports import Tool
from services.env_gateway.tools.tool_selection import COMPUTER


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
