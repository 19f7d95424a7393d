"""A backend of MCP servers over stdio for tests, and what its episodes do."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from flotilla_env_gateway.adapters.mcp.servers import McpServersBackend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.ports import Instance, Text


@asynccontextmanager
async def backend_of(config: EnvGatewayConfig) -> AsyncGenerator[McpServersBackend]:
    backend = McpServersBackend(config)
    try:
        yield backend
    finally:
        await backend.close()


async def called(instance: Instance, name: str, timeout_s: float = 10.0) -> str:
    result = await instance.call_tool(name, {}, timeout_s=timeout_s)
    return "".join(part.text for part in result.parts if isinstance(part, Text))


def folders_of(temporary: Path) -> list[str]:
    """The folders of episodes below `temporary`."""
    return [path.name for path in temporary.glob("flotilla-episodes-*/*")]
