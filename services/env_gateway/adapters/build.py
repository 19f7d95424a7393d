"""Makes a backend from its settings. Each vendor is imported only where it is used."""

from collections.abc import Callable, Mapping

from services.env_gateway.config.backends import BackendName, BackendsConfig
from services.env_gateway.ports import Backend


def build(name: BackendName, config: BackendsConfig, *, max_calls: int) -> Backend:
    """Raises ConfigError for what only shows here, such as a key missing in the environment.

    `max_calls` is how many calls will be in flight at most.
    """
    return _BUILDERS[name](config, max_calls)


def _embedded(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.embedded.backend import EmbeddedBackend

    return EmbeddedBackend(config.embedded)


def _mcp(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.mcp import backend as mcp
    from services.env_gateway.adapters.mcp import stdio as mcp_stdio

    assert config.mcp is not None, "checked by EnvGatewayConfig"
    if config.mcp.transport == "stdio":
        return mcp_stdio.McpStdioBackend(config.mcp)
    return mcp.build(config.mcp, max_calls=max_calls)


def _openenv(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.openenv import backend as openenv

    assert config.openenv is not None, "checked by EnvGatewayConfig"
    return openenv.build(config.openenv, max_calls=max_calls)


def _fleet(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.fleet import backend as fleet

    assert config.fleet is not None, "checked by EnvGatewayConfig"
    return fleet.build(config.fleet, max_calls=max_calls)


def _fleet_openenv(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.fleet_openenv import backend as fleet_openenv

    return fleet_openenv.build(config.fleet_openenv, max_calls=max_calls)


_BUILDERS: Mapping[BackendName, Callable[[BackendsConfig, int], Backend]] = {
    "embedded": _embedded,
    "mcp": _mcp,
    "fleet": _fleet,
    "fleet_openenv": _fleet_openenv,
    "openenv": _openenv,
}
