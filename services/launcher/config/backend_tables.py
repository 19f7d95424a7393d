"""Settings of the gateway's backends in a spec."""

from collections.abc import Mapping
from typing import Any

# Plays a recorded run, in place of all environments.
REPLAY = "replay"


def without_replaced(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the gateway's section of a spec without the backends and servers that a recorded run
    replaces, and so without their secrets; as it is if none is replayed."""
    if section.get("backend") != REPLAY:
        return section
    environments: Mapping[str, Mapping[str, Any]] = section.get("environments", {})
    own = {key: {**each, "backend": None, "servers": []} for key, each in environments.items()}
    tables = {REPLAY: section.get("backends", {}).get(REPLAY)}
    return {**section, "environments": own, "servers": [], "backends": tables}


def backend_of(section: Mapping[str, Any], env_key: str) -> str:
    """Return the backend of an environment, its own or that of all; "" if the section, which is the
    gateway's, names none."""
    own: Mapping[str, Any] = section.get("environments", {}).get(env_key) or {}
    return own.get("backend") or section.get("backend") or ""


def backend_tables(section: Mapping[str, Any], backend: str) -> dict[str, Mapping[str, Any]]:
    """Return the tables of a backend, by their keys in the spec: one, or those of all MCP servers.
    `section` is the gateway's."""
    if backend == "mcp":
        servers = section.get("servers", [])
        return {f"env_gateway.servers.{n}": each for n, each in enumerate(servers)}
    return {f"env_gateway.backends.{backend}": section.get("backends", {}).get(backend) or {}}
