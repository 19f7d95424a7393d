"""Settings of each backend, `[env_gateway.backends.NAME]`. Imports no vendor."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.common.config import Model

Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]

BackendName = Literal["mcp", "embedded", "fleet", "openenv", "fleet_openenv"]


class ServerConfig(Model):
    """A server: one that runs at `url`, or a `command` to supervise.

    A command is expected to print one JSON line {"url": ...} on stdout once it serves.
    """

    url: str | None = None
    command: tuple[str, ...] | None = None
    api_key_env: str | None = None
    start_timeout_s: Seconds = 60.0

    _schemes: tuple[str, ...] = ("http://", "https://")

    @model_validator(mode="after")
    def _one_source(self) -> "ServerConfig":
        if (self.url is None) == (self.command is None):
            raise ValueError("exactly one of url and command must be set")
        if self.url is not None and not self.url.startswith(self._schemes):
            raise ValueError(f"url {self.url!r} must start with {' or '.join(self._schemes)}")
        if self.command is not None and not self.command:
            raise ValueError("command is empty")
        return self


class McpConfig(ServerConfig):
    """An MCP server over streamable HTTP.

    With `instances` the server also speaks Fleet's instance wire, and each episode gets an instance
    of its own; without, all episodes share the one server and there is no database to grade from.
    """

    instances: bool = False
    read_only_tools: tuple[str, ...] = ()


class FleetConfig(ServerConfig):
    """Fleet's control plane. A `command` is an emulator to supervise instead."""

    api_key_env: str | None = "FLEET_API_KEY"


class OpenEnvConfig(ServerConfig):
    """An OpenEnv server, by its WebSocket protocol."""


class FleetOpenEnvConfig(Model):
    """FleetTaskEnv of an OpenEnv fork, in worker processes."""


class EmbeddedConfig(Model):
    """The environments of this repository, in worker processes."""


class BackendsConfig(Model):
    """Settings by backend; those that are not used may stay in the file."""

    mcp: McpConfig | None = None
    fleet: FleetConfig | None = None
    openenv: OpenEnvConfig | None = None
    fleet_openenv: FleetOpenEnvConfig = FleetOpenEnvConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
