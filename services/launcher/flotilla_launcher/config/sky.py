"""`[launcher.sky]`: the machines that a run requests from SkyPilot, and the retries."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import Seconds
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Machine(ConfigModel):
    """One candidate, with SkyPilot's own field names. SkyPilot chooses omitted fields."""

    # `lambda`, `aws/us-east-1`, `slurm/mycluster/gpu`, `kubernetes/context`, `ssh/pool`.
    infra: str | None = None
    # Example: `H100:8`.
    accelerators: str | None = None
    # `8+`: at least 8.
    cpus: str | None = None
    # GiB; `64+`: at least 64.
    memory: str | None = None
    # GB.
    disk_size: int | None = Field(default=None, ge=1, le=1_000_000)
    disk_tier: Literal["low", "medium", "high", "ultra", "best"] | None = None
    use_spot: bool = False
    image_id: str | None = None
    # US dollars per machine; more expensive ones are rejected.
    max_hourly_cost: float | None = Field(default=None, gt=0, le=1e6)


class Machines(ConfigModel):
    """Machines that the replicas of a service may run on: one candidate, or several.

    `any_of` picks the cheapest candidate, `ordered` the first one available."""

    any_of: tuple[Machine, ...] = ()
    ordered: tuple[Machine, ...] = ()
    # Machines of one replica, in one private network. Each machine of a learner runs
    # `learner.rank.processes` ranks; those of a rollout share the workers of its one engine
    # evenly; a gateway is one machine.
    num_nodes: int = Field(default=1, ge=1, le=64)

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if self.any_of and self.ordered:
            raise ValueError("any_of and ordered exclude each other: set only one")
        return self

    @property
    def candidates(self) -> tuple[Machine, ...]:
        return self.any_of or self.ordered or (Machine(),)


class ProvisionConfig(ConfigModel):
    """Number of attempts to get machines, and the pauses between them."""

    attempts: int = Field(default=4, ge=1, le=20)
    # Seconds before the second attempt; doubled before each further one.
    backoff_s: float = Field(default=120.0, ge=0, le=7 * 86400)
    # Limit of one attempt: from the request to the first report of a machine's watcher.
    timeout_s: Seconds = 1800.0
    # Machines of a replica whose setup may fail before the setup itself counts as broken.
    setups: int = Field(default=2, ge=1, le=20)

    def attempt_delay_s(self, failures: int) -> float:
        return self.backoff_s * 2 ** (failures - 1)


class SkyConfig(ConfigModel):
    """Settings of a run on machines that SkyPilot finds."""

    # Host of this launcher as seen from the machines; detected when absent.
    advertise: str | None = None
    # Port that the run's registry listens on; 0 is any free one.
    registry_port: int = Field(default=0, ge=0, le=65535)
    # `private`: all machines share a network. `public`: they reach each other by public addresses
    # and opened ports; weights travel by files or gRPC.
    network: Literal["private", "public"] = "private"
    # Port of the learner and the gateway on their machines; weights are served at the next one.
    port: int = Field(default=50051, ge=1, le=65534)
    # Restrict to this cloud: drop the candidates of others, request unspecific ones here.
    cloud: str | None = Field(default=None, pattern=r"^[a-z0-9]+$")
    learner: Machines = Machines()
    env_gateway: Machines = Machines()
    rollout: Machines = Machines()
    # Shell that puts the environment in place on a fresh machine, in the code's folder.
    setup: str = "make setup"
    # Interpreter of the services on the machines, relative to the code's folder.
    python: str = ".venv/bin/python"
    # Commit that the machines run; the working tree's commit when absent.
    commit: str | None = None
    # Environment variables to pass as secrets, besides those that services declare.
    secrets: tuple[str, ...] = ()
    provision: ProvisionConfig = ProvisionConfig()
    # A machine idle for this long terminates itself.
    idle_minutes: int = Field(default=10, ge=1, le=7 * 1440)
    # A machine's replica ends when the launcher has been silent for this long.
    unit_lease_s: Seconds = 900.0
    labels: dict[str, str] = Field(default_factory=dict)

    def machines_for(self, service: str) -> Machines:
        """Return the machines as the spec requests them for a service, at any cloud."""
        return {LEARNER: self.learner, GATEWAY: self.env_gateway, ROLLOUT: self.rollout}[service]

    @field_validator("secrets")
    @classmethod
    def _each_is_named(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not the name of an environment variable: list each variable by"
                    " name. Patterns such as '*' would pass variables that the run does not need"
                )
        return names
