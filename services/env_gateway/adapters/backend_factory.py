"""Factory of backends. A vendor is imported only if a backend uses it."""

from collections.abc import Callable, Mapping

from services.env_gateway.config.backends import BackendName, BackendsConfig
from services.env_gateway.ports import Backend


def build_backend(name: BackendName, config: BackendsConfig, *, max_calls: int) -> Backend:
    """Build the backend of this name from its settings.

    Raises ConfigError for faults that only show here, such as a key missing in the environment.
    `max_calls` is the largest number of calls in flight."""
    return _BUILDERS[name](config, max_calls)


def _build_embedded(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.embedded.backend import EmbeddedBackend

    return EmbeddedBackend(config.embedded)


def _build_mcp(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.mcp import backend as mcp
    from services.env_gateway.adapters.mcp import stdio as mcp_stdio

    assert config.mcp is not None, "checked by EnvGatewayConfig"
    if config.mcp.transport == "stdio":
        return mcp_stdio.McpStdioBackend(config.mcp)
    return mcp.build_mcp_backend(config.mcp, max_calls=max_calls)


def _build_openenv(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.openenv import backend as openenv

    assert config.openenv is not None, "checked by EnvGatewayConfig"
    return openenv.build_openenv_backend(config.openenv, max_calls=max_calls)


def _build_fleet(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.fleet import backend as fleet

    assert config.fleet is not None, "checked by EnvGatewayConfig"
    return fleet.build_fleet_backend(config.fleet, max_calls=max_calls)


def _build_fleet_openenv(config: BackendsConfig, max_calls: int) -> Backend:
    from services.env_gateway.adapters.fleet_openenv import backend as fleet_openenv

    return fleet_openenv.build_fleet_openenv_backend(config.fleet_openenv, max_calls=max_calls)


_BUILDERS: Mapping[BackendName, Callable[[BackendsConfig, int], Backend]] = {
    "embedded": _build_embedded,
    "mcp": _build_mcp,
    "fleet": _build_fleet,
    "fleet_openenv": _build_fleet_openenv,
    "openenv": _build_openenv,
}
