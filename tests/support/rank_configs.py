"""Configurations that are made without torch."""

from pathlib import Path

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.learner import LearnerConfig

LEARNER = LearnerConfig.model_validate(
    {
        "tasks": "none",
        "steps": 10,
        "groups_per_step": 3,
        "group_size": 4,
        "optimizer": {"lr": 1e-2},
        # A burn-in tries this many.
        "rank": {"pack_tokens": 512},
    }
)

# An algorithm that uses every model and every pass of a rank.
EVERYTHING: dict[str, object] = {
    "advantage": "gae",
    "proximal": "trainer",
    "entropy_coefficient": 0.01,
    "epochs": 2,
    "mini_batches": 2,
    "kl": {"coefficient": 0.05},
    "critic": {"lr": 1e-3},
}

# The place of a single rank.
ALONE = {"index": 0, "count": 1, "rendezvous": "file:///nowhere", "slot": 0, "slots": 1}


def policy_config(folder: Path, **changes: object) -> PolicyConfig:
    """Return the policy section of a tiny float32 model."""
    values = {"model": str(folder), "dtype": "float32", "max_model_len": 128, **changes}
    return PolicyConfig.model_validate(values)


def several(processes: int) -> LearnerConfig:
    """The given number of ranks, and losses that need them all."""
    rank = LEARNER.rank.model_copy(update={"processes": processes})
    return LEARNER.model_copy(update={"rank": rank})
