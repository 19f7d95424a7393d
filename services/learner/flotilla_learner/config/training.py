"""Training at callers' requests: `[learner.training]`, and the section of its service."""

from pydantic import Field

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.spec import ServiceConfig, SharedConfig
from flotilla_learner.config.rank import RankConfig


class TrainingConfig(ConfigModel):
    """Limits on the models that callers create."""

    # Models at a time. Those with adapters share one base; one with all weights has its own ranks.
    max_models: int = Field(default=8, ge=1, le=1024)
    # Largest rank of adapters.
    max_rank: int = Field(default=64, ge=1, le=512)


class TrainingServiceConfig(ServiceConfig):
    """`[learner]` of a service that trains at callers' requests: it has no run of its own."""

    rank: RankConfig = RankConfig()
    training: TrainingConfig = TrainingConfig()

    def check(self, shared: SharedConfig) -> None:
        rank = self.rank
        unserved = {
            "learner.rank.shard": rank.shard,
            "learner.rank.nodes": rank.nodes > 1,
            "learner.rank.compile": rank.compile,
            "learner.rank.offload_optimizer": rank.offload_optimizer,
            "policy.routing_replay": shared.policy.routing_replay != "off",
            "policy.vision": shared.policy.vision is not None,
        }
        if named := [key for key, is_set in unserved.items() if is_set]:
            raise ConfigError(
                f"{named[0]}: training at callers' requests does not have it yet; leave it out"
            )
