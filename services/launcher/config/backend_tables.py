"""Settings of the gateway's backends in a spec."""

from collections.abc import Mapping
from typing import Any


def backend_tables(section: Mapping[str, Any], backend: str) -> dict[str, Mapping[str, Any]]:
    """Return the tables of a backend, by their keys in the spec: one, or those of all MCP servers.
    `section` is the gateway's."""
    if backend == "mcp":
        servers = section.get("servers", [])
        return {f"env_gateway.servers.{n}": each for n, each in enumerate(servers)}
    return {f"env_gateway.backends.{backend}": section.get("backends", {}).get(backend) or {}}
