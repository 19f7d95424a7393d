"""Imports of environments, of their servers and of the gateway, for a forge."""

from importlib import import_module

_NAMES = (
    *(
        "flotilla_environments.fleet_emulator.__main__",
        "flotilla_environments.serve",
        "mcp.server.mcpserver",
    ),
    *("flotilla_environments.fleet_emulator.app", "flotilla_env_gateway.__main__"),
)

for _name in _NAMES:
    import_module(_name)
