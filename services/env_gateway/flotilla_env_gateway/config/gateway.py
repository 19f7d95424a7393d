"""The gateway's section of a run spec, `[env_gateway]`."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.function_names import FunctionName
from flotilla_common.spec.number_ranges import Count, Seconds
from flotilla_env_gateway.config.backend_tables import BackendsConfig
from flotilla_env_gateway.config.backends import REPLAY, BackendName, McpServer, SourceName

Weight = Annotated[float, Field(gt=0, le=1000)]


class ScreenConfig(ConfigModel):
    """Presentation of a screen to the policy.

    `vocabulary`: names of the actions that the policy is offered, whatever the environment's tools
    speak; absent: the environment's. `coordinates`: the policy points in pixels of the picture that
    it sees, in thousandths of the screen, or with numbers from 0 to 1; absent: as the policy's
    model was trained to, else as the vocabulary has it. `max_side`: pictures are scaled down, in
    proportion, until no side is longer; pixels."""

    vocabulary: Literal["fleet", "cua", "anthropic", "openai"] | None = None
    coordinates: Literal["pixels", "relative1000", "normalized"] | None = None
    max_side: Annotated[int, Field(ge=64, le=16384)] | None = None

    def fill_coordinates(self, units: Literal["pixels", "relative1000"] | None) -> "ScreenConfig":
        """Return the settings with the units that the policy's model points in, unless they name
        others."""
        return self if self.coordinates else self.model_copy(update={"coordinates": units})


class EnvironmentConfig(ConfigModel):
    """Overrides for one environment; unset fields take the section's values. `verifier` grades
    tasks without a verifier of their own: a Python file, or a function of an installed module or of
    one beside the spec, `"mypackage.rewards:graded"`. `servers` names the MCP servers
    whose tools its tasks get, unless a task names its own; not needed if only one is configured.

    With `grading = "judge"` no verifier runs, not even a task's own: `[learner.judge]` compares the
    attempts of each group."""

    backend: BackendName | None = None
    servers: tuple[str, ...] = ()
    screen: ScreenConfig | None = None
    verifier: str | None = None
    grading: Literal["verifier", "judge"] = "verifier"
    max_episodes: Count | None = None
    max_calls: Count | None = None

    @model_validator(mode="after")
    def _one_grades(self) -> "EnvironmentConfig":
        if self.grading == "judge" and self.verifier is not None:
            raise ValueError(
                'verifier: it never runs with grading = "judge"; leave one of the two out'
            )
        return self


class LimitsConfig(ConfigModel):
    """Limits on episodes, calls, creations and grades.

    Calls in flight, for each environment, and creations in flight, for each backend, start
    at `start_calls` and `start_creating`. They adapt to the observed capacity, up to
    `max_calls` and `max_creating`. Creations are further limited to `creates_per_s`, with
    bursts of `creates_burst`. Deletions are bounded by the same keys, apart from creations,
    and grades likewise. Instances that are not ready yet are probed for their tools within
    half of `max_calls`.

    The calls of one run in one environment may hold all of `max_calls` but `reserved_share`, which
    stays free for others; several that keep all they get leave a smaller share, but never none.

    Refused grades (429) lower the rate of grades to what is admitted, rather than their number in
    flight.

    `max_waiting` bounds the episodes in the queue. `batch_wait_s` is how long a batch waits
    there for missing members before it proceeds without them. `record_bytes` bounds the run's
    recording. Runs that
    compete for the same places share them by weight: 1, or that of the first pattern of
    `run_weights`, such as "eval-*", that matches the run's id."""

    max_episodes: Count = 512
    start_calls: Count = 16
    max_calls: Count = 256
    reserved_share: Annotated[float, Field(ge=0, le=0.9)] = 0.2
    start_creating: Count = 8
    max_creating: Count = 64
    creates_per_s: Annotated[float, Field(gt=0, le=10_000)] = 100.0
    creates_burst: Count = 64
    start_grading: Count = 16
    max_grading: Count = 64
    grades_per_s: Annotated[float, Field(gt=0, le=10_000)] = 100.0
    grades_burst: Count = 64
    max_waiting: Count = 2048
    batch_wait_s: Seconds = 5.0
    run_weights: Mapping[str, Weight] = Field(default_factory=dict)
    transcript_bytes: Annotated[int, Field(ge=2**10, le=2**30)] = 16 * 2**20
    media_bytes: Annotated[int, Field(ge=2**16, le=2**32)] = 64 * 2**20
    record_bytes: Annotated[int, Field(ge=2**16, le=2**50)] = 4 * 2**30


class WarmStartsConfig(ConfigModel):
    """Servers over stdio that are started ahead of their episodes: up to `size` for each set of
    servers that episodes need together, at most `starts_per_s`, as long as those that wait take no
    more than `memory_mib` in all. A set of which a server gets the task's variables
    (`task_variables`) is started with its episode."""

    size: Annotated[int, Field(ge=0, le=4096)] = 0
    starts_per_s: Annotated[float, Field(gt=0, le=1000)] = 2.0
    memory_mib: Annotated[int, Field(ge=1, le=2**24)] = 4096


class BreakerConfig(ConfigModel):
    """Circuit breaker of one environment.

    If more than `error_rate` of its last `window` calls failed, no calls are made for
    `open_s`. After `instance_failures` consecutive failures to reach one instance, its
    backend is queried whether the instance still runs. A timeout counts as a failure only if
    the backend was given at least `patience_s` and four times its slowest recent answer."""

    window: Annotated[int, Field(ge=1, le=10_000)] = 20
    error_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    open_s: Seconds = 5.0
    instance_failures: Annotated[int, Field(ge=1, le=1000)] = 3
    patience_s: Seconds = 5.0


class RetryConfig(ConfigModel):
    """Retries of tool calls. Waits are jittered between `base_s` and `cap_s`; `budget_ratio`
    bounds retries as a share of first attempts."""

    base_s: Seconds = 0.1
    cap_s: Seconds = 5.0
    budget_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    budget_cap: Annotated[float, Field(ge=1, le=10_000)] = 20.0


class VerifiersConfig(ConfigModel):
    """Verifiers, which are Python from task files. Those listed by SHA-256 in `digests`, a file
    beside the spec or by default that of this repository, run in plain processes, all others in a
    sandbox of bubblewrap, one process each. Without a sandbox they are refused, unless
    `unsafe_local_verifiers` lets them run with all rights of the gateway.

    `timeout_s` bounds one run, and `memory_bytes` its address space. A failed run is repeated, up
    to `attempts` in all; runs refused before they began do not count, and are retried until the
    grade's deadline.

    `partial`: the share of passed checks is reported as "returned" by the verifier, or as "earned",
    without those that pass on the untouched state (which takes one more run for each task), or
    "off". With `partial_is_reward` a failing attempt earns that share instead of 0; a verifier that
    only prints its checks then gives no grade.

    `trusted`: modules and packages whose functions (`environments.KEY.verifier`) run with all
    packages and rights of the gateway, in processes of their own."""

    workers: Annotated[int, Field(ge=1, le=64)] = 2
    timeout_s: Seconds = 30.0
    attempts: Annotated[int, Field(ge=1, le=10)] = 4
    memory_bytes: Annotated[int, Field(ge=2**26, le=2**36)] = 2**30
    partial: Literal["off", "returned", "earned"] = "returned"
    partial_is_reward: bool = False
    digests: Path | None = None
    unsafe_local_verifiers: bool = False
    trusted: tuple[str, ...] = ()

    def trusts(self, module: str) -> bool:
        """Return True if `trusted` names the module, or a package that holds it."""
        return any(f"{module}.".startswith(f"{name}.") for name in self.trusted)

    @field_validator("partial", mode="before")
    @classmethod
    def _returned_checks(cls, value: object) -> object:
        if value == "printed":
            raise ValueError(
                "printed checks earn nothing, because the policy may have written them: let "
                'verifiers return {"score": ..., "passed": [...], "failed": [...]}, and set '
                'partial = "returned" or "earned"'
            )
        return value

    @model_validator(mode="after")
    def _something_to_earn(self) -> "VerifiersConfig":
        if self.partial_is_reward and self.partial == "off":
            raise ValueError('partial_is_reward needs partial = "earned" or "returned"')
        return self


class EnvGatewayConfig(ConfigModel):
    """Settings of the gateway.

    `lease_ttl_s`: an episode is closed if its worker does not renew it for this long.
    `budget_s` bounds an episode that names no budget, and `max_budget_s` every other. With `record`
    the episodes are recorded below the run's directory; backend "replay" plays such a recording in
    place of all environments, whatever their own backends and servers."""

    backend: SourceName = "embedded"
    record: bool = False
    servers: tuple[McpServer, ...] = ()
    backends: BackendsConfig = BackendsConfig()
    environments: Mapping[str, EnvironmentConfig] = Field(default_factory=dict)
    limits: LimitsConfig = LimitsConfig()
    warm_starts: WarmStartsConfig = WarmStartsConfig()
    breaker: BreakerConfig = BreakerConfig()
    retry: RetryConfig = RetryConfig()
    verifiers: VerifiersConfig = VerifiersConfig()
    screen: ScreenConfig = ScreenConfig()
    lease_ttl_s: Seconds = 60.0
    budget_s: Seconds = 900.0
    max_budget_s: Seconds = 7200.0
    open_timeout_s: Seconds = 120.0
    call_timeout_s: Seconds = 90.0
    close_timeout_s: Seconds = 30.0
    drain_s: Seconds = 30.0
    watch_age_s: Seconds = 60.0
    # A longer opening, call or grade is logged with all stacks.
    stall_s: Seconds = 120.0

    @model_validator(mode="after")
    def _replay_replaces_all(self) -> "EnvGatewayConfig":
        if self.backend != REPLAY:
            return self
        nothing = {"backend": None, "servers": ()}
        own = {key: each.model_copy(update=nothing) for key, each in self.environments.items()}
        return self.model_copy(update={"environments": own, "servers": ()})

    @model_validator(mode="after")
    def _backends_configured(self) -> "EnvGatewayConfig":
        for name in sorted(self.backend_names):
            if name == "mcp" and not self.servers:
                raise ValueError(
                    "backend 'mcp' is used but there is no table [[env_gateway.servers]]"
                )
            if name != "mcp" and getattr(self.backends, name) is None:
                raise ValueError(
                    f"backend {name!r} is used but env_gateway.backends.{name} is not set"
                )
        return self

    @model_validator(mode="after")
    def _servers_have_names(self) -> "EnvGatewayConfig":
        names = [server.name for server in self.servers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"servers: two are named {name!r}; give each a name of its own")
        for env_key, environment in self.environments.items():
            for name in environment.servers:
                if name not in names:
                    known = ", ".join(names) or "none"
                    raise ValueError(
                        f"environments.{env_key}.servers: there is no server {name!r};"
                        f" those in [[env_gateway.servers]]: {known}"
                    )
        return self

    @model_validator(mode="after")
    def _trusted_are_used(self) -> "EnvGatewayConfig":
        modules = [name.module for name in self.functions.values()]
        for name in self.verifiers.trusted:
            if not any(f"{module}.".startswith(f"{name}.") for module in modules):
                known = ", ".join(modules) or "none"
                raise ValueError(
                    f"verifiers.trusted: no environment's verifier is a function of {name!r};"
                    f" the modules of those in environments.*.verifier: {known}"
                )
        return self

    @model_validator(mode="after")
    def _functions_run_here(self) -> "EnvGatewayConfig":
        fleet, openenv = self.backends.fleet, self.backends.openenv
        elsewhere = {"fleet_openenv": 'the backend "fleet" with verify = "local"'}
        if fleet is not None and fleet.verify == "remote":
            elsewhere["fleet"] = 'env_gateway.backends.fleet.verify = "local"'
        if openenv is not None and openenv.reward != "verifier":
            elsewhere["openenv"] = 'env_gateway.backends.openenv.reward = "verifier"'
        for env_key, name in self.functions.items():
            backend = self.backend_of(env_key)
            if fix := elsewhere.get(backend):
                raise ValueError(
                    f"environments.{env_key}.verifier: {name} never runs, because the backend"
                    f" {backend!r} grades elsewhere; use {fix}"
                )
        return self

    @property
    def functions(self) -> dict[str, FunctionName]:
        """The environments' verifiers that are functions of modules, by environment."""
        named = ((key, each.verifier or "") for key, each in self.environments.items())
        return {key: name for key, text in named if (name := FunctionName.parse(text))}

    @property
    def backend_names(self) -> frozenset[SourceName]:
        """The backends in use."""
        names: set[SourceName] = {self.backend}
        names.update(e.backend for e in self.environments.values() if e.backend)
        return frozenset(names)

    def weight_of(self, run_id: str) -> float:
        weights = self.limits.run_weights.items()
        return next((weight for glob, weight in weights if fnmatchcase(run_id, glob)), 1.0)

    def max_calls_of(self, env_key: str) -> int:
        environment = self.environments.get(env_key)
        return (environment and environment.max_calls) or self.limits.max_calls

    def is_judged(self, env_key: str) -> bool:
        """Return True if a judge compares the attempts of an environment's groups."""
        environment = self.environments.get(env_key)
        return environment is not None and environment.grading == "judge"

    def backend_of(self, env_key: str) -> SourceName:
        environment = self.environments.get(env_key)
        return (environment and environment.backend) or self.backend

    def fill_coordinates(
        self, units: Literal["pixels", "relative1000"] | None
    ) -> "EnvGatewayConfig":
        """Return the settings with every screen's coordinates those of the policy's model, unless
        they name others."""
        environments = {
            key: each.model_copy(
                update={"screen": each.screen and each.screen.fill_coordinates(units)}
            )
            for key, each in self.environments.items()
        }
        screen = self.screen.fill_coordinates(units)
        return self.model_copy(update={"screen": screen, "environments": environments})

    def screen_config_of(self, env_key: str) -> ScreenConfig:
        environment = self.environments.get(env_key)
        return (environment and environment.screen) or self.screen
