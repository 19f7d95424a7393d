"""How far engine and trainer may differ, by precision. Measured in docs/mismatch.md."""

from collections.abc import Mapping

from services.learner.config.guard import GuardConfig
from services.learner.guard.control_chart import Bound, Rules

# Two to three times what the worst healthy pair of engine and trainer was found to differ by in
# bfloat16, a hundred times in float32, where nothing but the order of additions differs.
BOUNDS: Mapping[str, Bound] = {
    "float32": Bound(mean=1e-4, tail=1e-3, kl=1e-6),
    "bfloat16": Bound(mean=0.08, tail=0.75, kl=5e-3),
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
