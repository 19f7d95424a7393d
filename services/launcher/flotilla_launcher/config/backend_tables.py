"""Settings of the gateway's backends in a spec."""

from collections.abc import Mapping
from typing import Any

# Plays a recorded run, in place of all environments.
REPLAY = "replay"
# Backends of Fleet, whose `api_key_env` has a default.
FLEET_BACKENDS = ("fleet", "fleet_openenv")
FLEET_KEY = "FLEET_API_KEY"


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


def key_variables(section: Mapping[str, Any]) -> list[str]:
    """Return the API key variables of the environments in use. A backend with its own `command`
    needs none. `section` is the gateway's."""
    environments: Mapping[str, Mapping[str, Any]] = section.get("environments", {})
    used = {section.get("backend"), *(e.get("backend") for e in environments.values())}
    named: list[str] = []
    for backend in sorted(name for name in used if name):
        default = FLEET_KEY if backend in FLEET_BACKENDS else None
        for options in backend_tables(section, backend).values():
            variable = options.get("api_key_env", default)
            if variable and not options.get("command"):
                named.append(variable)
    return named
