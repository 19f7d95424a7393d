"""How far engine and trainer may differ, by precision. Measured in docs/mismatch.md."""

from collections.abc import Mapping

from services.learner.guard.chart import Bound, Rules
from services.learner.guard.config import GuardConfig

# Another order of the same float32 (bfloat16) arithmetic stays well below.
BOUNDS: Mapping[str, Bound] = {
    "float32": Bound(mean=1e-4, tail=1e-3, kl=1e-6),
    "bfloat16": Bound(mean=0.03, tail=0.25, kl=2e-3),
}


def bound_of(config: GuardConfig, dtype: str) -> Bound:
    """The bound of a run: its precision's, but for what the config says itself."""
    own = BOUNDS[dtype]
    return Bound(
        mean=own.mean if config.mean_bound is None else config.mean_bound,
        tail=own.tail if config.tail_bound is None else config.tail_bound,
        kl=own.kl if config.kl_bound is None else config.kl_bound,
    )


def rules_of(config: GuardConfig, dtype: str) -> Rules:
    return Rules(
        bound=bound_of(config, dtype),
        sigmas=config.sigmas,
        smoothing=config.smoothing,
        warmup_versions=config.warmup_versions,
        floor=config.floor,
        healthy_versions=config.healthy_versions,
    )
