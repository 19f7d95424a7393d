"""Factory of backends. A vendor is imported only if a backend uses it."""

from flotilla_env_gateway.config.backends import SourceName
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.ports import Backend


def build_backend(name: SourceName, section: EnvGatewayConfig) -> Backend:
    """Build the backend of this name from its settings, which EnvGatewayConfig has checked.

    Raises ConfigError for faults that only show here, such as a key missing in the environment."""
    config, max_calls = section.backends, section.limits.max_calls
    match name:
        case "embedded":
            from flotilla_env_gateway.adapters.embedded.backend import EmbeddedBackend

            return EmbeddedBackend(config.embedded)
        case "mcp":
            from flotilla_env_gateway.adapters.mcp.servers import McpServersBackend

            return McpServersBackend(section)
        case "fleet":
            from flotilla_env_gateway.adapters.fleet.backend import build_fleet_backend

            assert config.fleet is not None
            return build_fleet_backend(config.fleet, max_calls=max_calls)
        case "fleet_openenv":
            from flotilla_env_gateway.adapters.fleet_openenv import backend as fleet_openenv

            return fleet_openenv.build_fleet_openenv_backend(
                config.fleet_openenv, max_calls=max_calls
            )
        case "replay":
            from flotilla_env_gateway.adapters.replay.backend import ReplayBackend

            assert config.replay is not None
            return ReplayBackend(config.replay)
        case "openenv":
            from flotilla_env_gateway.adapters.openenv.backend import build_openenv_backend

            assert config.openenv is not None
            return build_openenv_backend(config.openenv, max_calls=max_calls)
