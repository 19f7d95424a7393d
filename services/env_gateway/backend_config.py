"""Settings of each backend, `[env_gateway.backends.NAME]`. Imports no vendor."""

from typing import Annotated, Any, Literal, cast

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
    """An MCP server over streamable HTTP, or over stdio.

    Over HTTP: with `instances` the server also speaks Fleet's instance wire, and each episode gets
    an instance of its own; without, all episodes share the one server and there is no database to
    grade from. Over stdio `command` is started once per episode, with the task's data key in its
    environment (FLOTILLA_DATA_KEY).
    """

    transport: Literal["http", "stdio"] = "http"
    instances: bool = False
    read_only_tools: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _stdio_needs_a_command(self) -> "McpConfig":
        if self.transport == "stdio" and (self.command is None or self.instances):
            raise ValueError('transport "stdio" needs a command, and cannot have instances')
        return self


FLEET_URL = "https://orchestrator.fleetai.com"


class FleetConfig(ServerConfig):
    """Fleet's control plane, FLEET_URL unless set; a `command` is an emulator to supervise instead.

    An instance of which Fleet hears nothing for `heartbeat_interval_s` ends, so that a gateway
    that is killed frees its places. Verifiers run at Fleet ("remote"), or in the gateway against
    the instance's databases ("local"). `image_type` is the task's modality's unless set, and
    `browser_url`, where browsers are leased, Fleet's or the emulator's. A browser may reach the
    environment and `browser_hosts`.
    """

    api_key_env: str | None = "FLEET_API_KEY"
    region: str | None = None
    image_type: str | None = None
    heartbeat_interval_s: Annotated[int, Field(ge=30, le=3600)] = 60
    verify: Literal["remote", "local"] = "remote"
    read_only_tools: tuple[str, ...] = ()
    browser_url: str | None = None
    browser_hosts: tuple[str, ...] = (
        "*.fleetai.com",
        "*.amazonaws.com",
        "*.basemaps.cartocdn.com",
        "*.tile.openstreetmap.org",
    )

    @model_validator(mode="before")
    @classmethod
    def _fleet_itself(cls, values: Any) -> Any:
        if isinstance(values, dict) and not {"url", "command"} & values.keys():
            return {**values, "url": FLEET_URL}
        return cast("Any", values)


class OpenEnvConfig(ServerConfig):
    """An OpenEnv server, by its WebSocket protocol."""


class FleetOpenEnvConfig(Model):
    """FleetTaskEnv of an OpenEnv fork, in worker processes."""


class EmbeddedConfig(Model):
    """The environments of this repository, in worker processes.

    A worker that is busy with one request for `hang_s` is ended, with the instances on it.
    """

    workers: Annotated[int, Field(ge=1, le=256)] = 2
    hang_s: Seconds = 30.0


class BackendsConfig(Model):
    """Settings by backend; those that are not used may stay in the file."""

    mcp: McpConfig | None = None
    fleet: FleetConfig | None = None
    openenv: OpenEnvConfig | None = None
    fleet_openenv: FleetOpenEnvConfig = FleetOpenEnvConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
