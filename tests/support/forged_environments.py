"""Imports of environments, of their servers and of the gateway, for a forge."""

from importlib import import_module

_NAMES = (
    *("environments.fleet_emulator.__main__", "environments.serve", "mcp.server.mcpserver"),
    *("environments.fleet_emulator.app", "services.env_gateway.__main__"),
)

for _name in _NAMES:
    import_module(_name)
