"""The gateway's section of a run spec, `[env_gateway]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.common.config import Model

Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class McpConfig(Model):
    """An MCP server over streamable HTTP: one that runs at `url`, or a `command` to supervise.

    A command is expected to print one JSON line {"url": ...} on stdout once it serves. With
    `instances` the server also speaks Fleet's instance wire, and each episode gets an instance of
    its own; without, all episodes share the one server and there is no database to grade from.
    """

    url: str | None = None
    command: tuple[str, ...] | None = None
    instances: bool = False
    api_key_env: str | None = None
    start_timeout_s: Seconds = 60.0
    read_only_tools: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_source(self) -> "McpConfig":
        if (self.url is None) == (self.command is None):
            raise ValueError("exactly one of url and command must be set")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} must start with http:// or https://")
        if self.command is not None and not self.command:
            raise ValueError("command is empty")
        return self


class BackendsConfig(Model):
    """Settings by backend. `embedded`, the environments of this repository in the gateway's own
    process, has none."""

    mcp: McpConfig | None = None


BackendName = Literal["mcp", "embedded"]


class EnvironmentConfig(Model):
    """One environment; what is not set here is the section's own."""

    backend: BackendName | None = None
    max_episodes: Count | None = None
    max_calls: Count | None = None


class LimitsConfig(Model):
    """`max_waiting` bounds episodes in the queue; `max_creating` instances being created."""

    max_episodes: Count = 512
    max_calls: Count = 256
    max_creating: Count = 64
    max_waiting: Count = 2048
    batch_ttl_s: Seconds = 30.0
    transcript_bytes: Annotated[int, Field(ge=2**10, le=2**30)] = 16 * 2**20
    media_bytes: Annotated[int, Field(ge=2**16, le=2**32)] = 64 * 2**20


class RetryConfig(Model):
    """Waits are jittered between `base_s` and `cap_s`; `budget_ratio` bounds retries as a share
    of first attempts."""

    base_s: Seconds = 0.1
    cap_s: Seconds = 5.0
    budget_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    budget_cap: Annotated[float, Field(ge=1, le=10_000)] = 20.0


class VerifiersConfig(Model):
    """Verifiers are Python from task files. Only those listed by SHA-256 in `digests` run, unless
    `unsafe_local_verifiers` allows all, without a sandbox."""

    workers: Annotated[int, Field(ge=1, le=64)] = 2
    timeout_s: Seconds = 30.0
    attempts: Annotated[int, Field(ge=1, le=10)] = 4
    memory_bytes: Annotated[int, Field(ge=2**26, le=2**36)] = 2**30
    digests: Path = Path("environments/verifiers.sha256")
    unsafe_local_verifiers: bool = False


class EnvGatewayConfig(Model):
    """`lease_ttl_s`: an episode whose worker renews it for this long no more is closed.
    `budget_s` bounds an episode that names no budget, and `max_budget_s` every other."""

    backend: BackendName = "embedded"
    backends: BackendsConfig = BackendsConfig()
    environments: Mapping[str, EnvironmentConfig] = Field(default_factory=dict)
    limits: LimitsConfig = LimitsConfig()
    retry: RetryConfig = RetryConfig()
    verifiers: VerifiersConfig = VerifiersConfig()
    lease_ttl_s: Seconds = 60.0
    budget_s: Seconds = 900.0
    max_budget_s: Seconds = 7200.0
    open_timeout_s: Seconds = 120.0
    call_timeout_s: Seconds = 90.0
    close_timeout_s: Seconds = 30.0
    drain_s: Seconds = 30.0
    watch_age_s: Seconds = 60.0
    # An opening, a call or a grade that takes longer is reported in the log, with all stacks.
    stall_s: Seconds = 120.0

    @model_validator(mode="after")
    def _backends_configured(self) -> "EnvGatewayConfig":
        used = {self.backend} | {e.backend for e in self.environments.values() if e.backend}
        if "mcp" in used and self.backends.mcp is None:
            raise ValueError("backend 'mcp' is used but env_gateway.backends.mcp is not set")
        return self

    def backend_of(self, env_key: str) -> BackendName:
        environment = self.environments.get(env_key)
        return (environment and environment.backend) or self.backend
