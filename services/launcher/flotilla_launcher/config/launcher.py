"""The launcher's own part of a run spec: `[launcher]`.

`drain_s` bounds the drain that `common/process/service_lifecycle.py` performs in a service."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from flotilla_common.spec.config import ConfigModel, parse_config
from flotilla_common.spec.number_ranges import Seconds
from flotilla_launcher.config.local import LocalConfig
from flotilla_launcher.config.notify import NotifyConfig
from flotilla_launcher.config.sky import SkyConfig
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, TokenCount


class ServiceShape(ConfigModel):
    """Number of a service's processes, and of the GPUs that each sees (0: all)."""

    replicas: int = Field(default=1, ge=1, le=256)
    gpus: int = Field(default=0, ge=0, le=64)


class LearnerShape(ConfigModel):
    """The learner's shape: one process, whose GPUs are divided among its ranks."""

    gpus: int = Field(default=0, ge=0, le=64)


class TokenPrices(ConfigModel):
    """What a Tinker service takes for tokens, in US dollars per million."""

    prompt: float = Field(ge=0, le=1e6)
    sample: float = Field(ge=0, le=1e6)
    train: float = Field(ge=0, le=1e6)

    def price_tokens(self, count: TokenCount) -> float:
        """Return the price of these tokens in US dollars."""
        dollars = count.prompt * self.prompt + count.sampled * self.sample
        return (dollars + count.trained * self.train) / 1e6


class LauncherConfig(ConfigModel):
    """Settings for starting, watching and ending a run."""

    # `local`: processes of this machine. `sky`: machines that SkyPilot finds.
    backend: Literal["local", "sky"] = "local"
    local: LocalConfig = LocalConfig()
    sky: SkyConfig = SkyConfig()
    # US dollars, and hours since the run began. The limit reached first drains and stops it.
    max_cost: float | None = Field(default=None, gt=0, le=1e9)
    max_hours: float | None = Field(default=None, gt=0, le=10 * 8766)
    # With learner.engine = "tinker": what the service's tokens cost, as part of max_cost; and how
    # many it may bill, of prompts, sampled and trained on together, before the run stops.
    token_prices: TokenPrices | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=2**53)
    notify: NotifyConfig = NotifyConfig()
    # Analyze each evaluation once its episodes are dumped, by a process of low priority.
    analysis: bool = True
    # Probes of `flotilla doctor` to leave out, by name.
    skip_probes: tuple[str, ...] = ()
    # Each service serves Prometheus on a free loopback port of its machine; `flotilla status`
    # shows the address.
    metrics: bool = False
    env_gateway: ServiceShape = ServiceShape()
    rollout: ServiceShape = ServiceShape()
    learner: LearnerShape = LearnerShape()
    # Modules to start in place of `services.X`: another implementation of the same contract. They
    # must be installed or on PYTHONPATH; the working directory is not searched.
    modules: dict[str, str] = Field(default_factory=dict)
    # Restarts of one replica within the window before the launcher gives it up.
    max_restarts: int = Field(default=5, ge=0, le=10_000)
    restart_window_s: Seconds = 600.0
    backoff_s: Seconds = 1.0
    backoff_max_s: Seconds = 30.0
    # From process start to the first serving heartbeat; loading a large model counts.
    start_timeout_s: Seconds = 1800.0
    # How long draining may take before processes are killed.
    drain_s: Seconds = 60.0
    # How long to search for the remains of a run before a leak is suspected.
    clean_s: float = Field(default=600.0, ge=0, le=7 * 86400)
    heartbeat_interval_s: Seconds = 1.0
    # A replica silent for this long is reported; only the end of its process counts as its death.
    silent_after_s: Seconds = 30.0
    # Services drain on their own when the launcher has been silent for this long.
    orphan_after_s: Seconds = 60.0

    def patience_s(self) -> float:
        """Return how long services continue without hearing from the launcher.

        On other machines their watcher ends them. A launcher that returns sooner finds them
        still running."""
        if self.backend == "sky":
            return max(self.orphan_after_s, self.sky.unit_lease_s)
        return self.orphan_after_s

    @property
    def encrypted(self) -> bool:
        """True if any replica is reached from other machines: all services then use TLS."""
        return self.backend != "local" or self.local.network != "loopback"

    def replica_counts(self) -> dict[str, int]:
        return {
            GATEWAY: self.env_gateway.replicas,
            LEARNER: 1,
            ROLLOUT: self.rollout.replicas,
        }

    def gpu_counts(self) -> dict[str, int]:
        return {
            GATEWAY: self.env_gateway.gpus,
            LEARNER: self.learner.gpus,
            ROLLOUT: self.rollout.gpus,
        }


def parse_launcher(spec: Mapping[str, Any], *, where: str = "spec") -> LauncherConfig:
    """Parse the `[launcher]` of a spec. Raises ConfigError."""
    return parse_config(LauncherConfig, spec.get("launcher", {}), where=where, section="launcher")
