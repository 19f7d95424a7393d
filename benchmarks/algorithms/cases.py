"""Compared cases: estimators and losses on policy, and corrections for stale samples."""

from dataclasses import dataclass, field

from flotilla_learner.config.algorithm import AlgorithmConfig, CorrectionConfig

STALENESS = (1, 4, 8)
ESTIMATORS = (
    *("grpo", "dr_grpo", "rloo", "reinforce_pp", "max_rl", "gae"),
    *("opo", "reinforce_pp_baseline"),
)
# On policy every ratio is 1, so that most losses have one gradient; these have another. LUSPO has
# the clips of GSPO's paper.
LOSSES = {
    "clip_cov": AlgorithmConfig(loss="clip_cov"),
    "luspo": AlgorithmConfig(
        loss="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        reduction="sequence_mean_token_sum_norm",
        norm_tokens=1,
    ),
}

# "none" compares the policy with itself at the start of the step, ignoring the samples' age.
CORRECTIONS = {
    "none": AlgorithmConfig(proximal="trainer"),
    "clip against the sampler": AlgorithmConfig(),
    "dppo_kl against the sampler, 0.05": AlgorithmConfig(
        loss="dppo_kl", clip_low=0.05, clip_high=0.05
    ),
    "decoupled PPO, token TIS 2": AlgorithmConfig(
        proximal="trainer", correction=CorrectionConfig(token_tis=2.0)
    ),
    "token mask 0.5 to 2": AlgorithmConfig(
        proximal="trainer", correction=CorrectionConfig(token_mask=(0.5, 2.0))
    ),
}


@dataclass(frozen=True)
class Case:
    """One row of the table; every batch is trained `staleness` steps after it was sampled."""

    table: str
    name: str
    staleness: int = 0
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)

    @property
    def key(self) -> str:
        return f"{self.table}/{self.name}/{self.staleness}"


def list_cases() -> list[Case]:
    """Return every row, in the order of the tables."""
    estimators = [
        Case("estimator", name, algorithm=AlgorithmConfig(advantage=name)) for name in ESTIMATORS
    ]
    losses = [Case("estimator", name, algorithm=algorithm) for name, algorithm in LOSSES.items()]
    stale = [
        Case("staleness", name, staleness, algorithm)
        for staleness in STALENESS
        for name, algorithm in CORRECTIONS.items()
    ]
    return estimators + losses + stale
