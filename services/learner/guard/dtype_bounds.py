"""Bounds of the mismatch between engine and trainer, by precision. Measured in
docs/mismatch.md."""

from collections.abc import Mapping

from services.learner.config.guard import GuardConfig
from services.learner.guard.control_chart import MismatchBound

# For bfloat16, 1.7 to 3.6 times the largest difference found between a healthy engine and
# trainer; for float32, where only the order of additions differs, a hundred times.
BOUNDS: Mapping[str, MismatchBound] = {
    "float32": MismatchBound(mean=1e-4, tail=1e-3, kl=1e-6),
    "bfloat16": MismatchBound(mean=0.08, tail=0.75, kl=5e-3),
}


def bound_of(config: GuardConfig, dtype: str) -> MismatchBound:
    """Return the bound of a run: its precision's, unless the config sets one."""
    own = BOUNDS[dtype]
    return MismatchBound(
        mean=own.mean if config.mean_bound is None else config.mean_bound,
        tail=own.tail if config.tail_bound is None else config.tail_bound,
        kl=own.kl if config.kl_bound is None else config.kl_bound,
    )
