"""Settings of backends and of servers. Imports no vendor."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flotilla_common.process.spec_commands import resolve_command
from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import Seconds
from flotilla_common.text.parsing import TextLimits
from flotilla_common.text.redaction import find_references

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Stands for the folder of an episode in the command and environment of its server.
EPISODE_DIR = "{episode_dir}"

BackendName = Literal["mcp", "embedded", "fleet", "openenv", "fleet_openenv"]
# A recorded run takes the place of all of them.
SourceName = Literal[BackendName, "replay"]
REPLAY = "replay"


def is_reference(value: str) -> bool:
    """Return True if a value refers to an environment variable, as `$NAME` does."""
    return any(find_references(value))


class ServerConfig(ConfigModel):
    """A server: one that runs at `url`, or a `command` to supervise.

    A command must print one JSON line {"url": ...} on stdout once it serves. From the gateway's
    environment it gets the variables that any program needs, such as PATH, HOME, language, proxies
    and certificates, and no secret; `env` adds to that. A value `$NAME` is that of the variable
    NAME.

    An answer of more than `max_answer_bytes`, or with more than `max_answer_values` values and
    keys, is refused before it is parsed: 100,000 values block the gateway for some 20 ms.
    """

    url: str | None = None
    command: tuple[str, ...] | None = None
    api_key_env: str | None = None
    env: Mapping[str, str] = Field(default_factory=dict[str, str])
    start_timeout_s: Seconds = 60.0
    max_answer_bytes: Annotated[int, Field(ge=2**16, le=2**30)] = 16 * 2**20
    max_answer_values: Annotated[int, Field(ge=2**10, le=2**24)] = 2**18

    _schemes: tuple[str, ...] = ("http://", "https://")
    _starts_processes: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "ServerConfig":
        given = [n for n in ("url", "command") if n in self.model_fields_set and getattr(self, n)]
        if len(given) > 1 or self.url is self.command is None:
            raise ValueError("exactly one of url and command must be set")
        if self.url is not None and not self.url.startswith(self._schemes):
            raise ValueError(f"url {self.url!r} must start with {' or '.join(self._schemes)}")
        if self.command is not None and not self.command:
            raise ValueError("command is empty")
        if self.command is not None:
            # Refuses an unknown command of `flotilla` before anything starts.
            resolve_command(self.command)
        return self

    @model_validator(mode="after")
    def _env_of_a_command(self) -> "ServerConfig":
        if self.env and self.command is None and not self._starts_processes:
            raise ValueError("env is for the process of a command, and there is none")
        for name, value in self.env.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"env.{name}: no name of a variable")
            if value.startswith("$") and not is_reference(value):
                raise ValueError(f"env.{name}: write {value!r} as $NAME, in capitals")
        return self

    @property
    def answer_limits(self) -> TextLimits:
        """Size limits of one answer."""
        return TextLimits(bytes=self.max_answer_bytes, values=self.max_answer_values)

    @property
    def fixed_url(self) -> str | None:
        """URL of the server, or None where the command reports it."""
        return self.url if self.command is None else None


class ToolServerConfig(ServerConfig):
    """A server whose instances take any number of calls at once.

    Calls of `read_only_tools` may be repeated, like those that the server's hints declare
    read-only. `parallel_reads` sets which consecutive ones an episode may run concurrently: none
    ("off"), only the `read_only_tools` ("listed"), or also the hinted ones ("hinted").
    """

    read_only_tools: tuple[str, ...] = ()
    parallel_reads: Literal["off", "listed", "hinted"] = "off"

    @model_validator(mode="after")
    def _something_listed(self) -> "ToolServerConfig":
        if self.parallel_reads == "listed" and not self.read_only_tools:
            raise ValueError('parallel_reads = "listed" needs read_only_tools, and there are none')
        return self


ServerName = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,32}$")]


class McpServer(ToolServerConfig):
    """An MCP server, one of `[[env_gateway.servers]]`, over streamable HTTP, over stdio, or over
    HTTP+SSE ("sse"), the transport of servers before 2025.

    Over HTTP, `url` is used exactly as written, and `headers` go with every request; the value
    `$NAME` is that of the variable NAME. With `instances` the server also implements Fleet's
    instance wire below `url`, and each episode gets its own instance; without, all episodes share
    the one server and there is no database to grade from. Over stdio `command` is started once per
    episode, with the task's data key in its environment (FLOTILLA_DATA_KEY), in a folder of the
    episode's own, which `{episode_dir}` names in `command` and `env`. The folder begins as a copy
    of the folder `template`, or empty. With `shared_state` all processes run in the gateway's
    working directory instead. Without `task_variables` the process gets nothing of the task, and
    can be started ahead of it. With `state_in_folder` the process then serves one episode after
    another: it keeps nothing but the folder, which is restored in between. `reset_tool` brings back
    to its beginning what a server keeps itself; the policy is not offered that tool.

    `sessions`: the state of an episode belongs to its session with the server ("stateful"), so that
    a session that the server forgets is a lost episode; or it does not ("stateless"), and a new
    session takes the place of a forgotten one. `listen`: keep a stream open for what a server asks
    outside of a call, if it offers one.
    """

    name: ServerName = "server"
    transport: Literal["http", "stdio", "sse"] = "http"
    instances: bool = False
    headers: Mapping[str, str] = Field(default_factory=dict[str, str])
    sessions: Literal["stateful", "stateless"] = "stateful"
    listen: bool = True
    template: Path | None = None
    shared_state: bool = False
    task_variables: bool = True
    state_in_folder: bool = False
    reset_tool: str | None = None

    @property
    def where(self) -> str:
        """The name of its table in messages."""
        return f"env_gateway.servers.{self.name}"

    @model_validator(mode="after")
    def _fits_the_transport(self) -> "McpServer":
        if self.transport == "stdio" and (self.command is None or self.instances):
            raise ValueError('transport "stdio" needs a command, and cannot have instances')
        if self.transport == "stdio" and self.headers:
            raise ValueError('headers are for a server over HTTP, and transport is "stdio"')
        if self.transport != "http" and self.sessions == "stateless":
            raise ValueError(f'over "{self.transport}" a session cannot be stateless')
        if self.instances and self.transport != "http":
            raise ValueError('instances need transport "http"')
        return self

    @model_validator(mode="after")
    def _folders_are_of_episodes(self) -> "McpServer":
        if self.transport != "stdio" and (self.template is not None or self.shared_state):
            raise ValueError('template and shared_state need transport "stdio"')
        reused = self.state_in_folder or self.reset_tool is not None
        if self.transport != "stdio" and (reused or not self.task_variables):
            raise ValueError(
                'task_variables, state_in_folder and reset_tool need transport "stdio"'
            )
        if reused and self.task_variables:
            raise ValueError(
                "state_in_folder and reset_tool let another task have the process: they need"
                " task_variables = false"
            )
        if self.state_in_folder and self.shared_state:
            raise ValueError("with shared_state no episode has a folder: state_in_folder is false")
        if self.shared_state and self.template is not None:
            raise ValueError("with shared_state no episode has a folder, and template is its copy")
        texts = (*(self.command or ()), *self.env.values())
        if any(EPISODE_DIR in text for text in texts) and (
            self.transport != "stdio" or self.shared_state
        ):
            why = 'needs transport "stdio" without shared_state'
            raise ValueError(f"{EPISODE_DIR} in command or env {why}")
        return self

    @model_validator(mode="after")
    def _names_of_headers(self) -> "McpServer":
        for name, value in self.headers.items():
            if not _HEADER.fullmatch(name) or not value.isprintable():
                raise ValueError(f"headers.{name}: no header of HTTP")
            if value.startswith("$") and not is_reference(value):
                raise ValueError(f"headers.{name}: write {value!r} as $NAME, in capitals")
        return self


FLEET_URL = "https://orchestrator.fleetai.com"


class FleetConfig(ToolServerConfig):
    """Fleet's control plane, FLEET_URL unless set; a `command` is an emulator to supervise instead.

    An instance without a heartbeat for `heartbeat_interval_s` ends, so that a killed gateway frees
    its places. Verifiers run at Fleet ("remote"), or in the gateway against the instance's
    databases ("local"). The task's modality sets the default `image_type`. Browsers are leased at
    `browser_url`, by default Fleet or the emulator, and may reach the environment and
    `browser_hosts`.
    """

    url: str | None = FLEET_URL
    api_key_env: str | None = "FLEET_API_KEY"
    region: str | None = None
    image_type: str | None = None
    heartbeat_interval_s: Annotated[int, Field(ge=30, le=3600)] = 60
    verify: Literal["remote", "local"] = "remote"
    browser_url: str | None = None
    browser_hosts: tuple[str, ...] = (
        "*.fleetai.com",
        "*.amazonaws.com",
        "*.basemaps.cartocdn.com",
        "*.tile.openstreetmap.org",
    )


class FleetOpenEnvConfig(ServerConfig):
    """FleetTaskEnv of Fleet's OpenEnv fork, one process each; the server is Fleet's control plane.

    `path` is a checkout of the fork, by default OPENENV_FORK_PATH, and `python` an interpreter with
    the fork's dependencies (such as mcp below 2), by default the gateway's own.
    """

    url: str | None = FLEET_URL
    api_key_env: str | None = "FLEET_API_KEY"
    path: str | None = None
    python: str | None = None

    _starts_processes: bool = True


class ReplayConfig(ConfigModel):
    """A run that was recorded (`record`), which stands in for every environment. `run` is its
    directory."""

    run: Path


class EmbeddedConfig(ConfigModel):
    """The environments of this repository, in worker processes.

    A worker that is busy with one request for `hang_s` is killed, with its instances.
    """

    workers: Annotated[int, Field(ge=1, le=256)] = 2
    hang_s: Seconds = 30.0
