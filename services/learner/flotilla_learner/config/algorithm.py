"""Settings of the RL algorithm: `[learner.algorithm]` and the tables below it.

Nothing here imports torch, since the service reads it too. Papers and equations are cited in
`services/learner/flotilla_learner/algo`."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flotilla_common.domain.attempts import REWARD_NAME, StopReason
from flotilla_common.spec.config import ConfigModel, did_you_mean, given_keys
from flotilla_common.spec.number_ranges import MOST_STEPS, MOST_TOKENS, Count, Tokens

# Largest bound for a ratio.
_MOST = 1e6
RewardName = Annotated[str, Field(pattern=REWARD_NAME)]
RewardWeight = Annotated[float, Field(ge=-1000, le=1000)]

ADVANTAGE_NAMES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "max_rl",
    "opo",
    "mt_grpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gdpo",
    "gae",
)
# Those that also learn from groups whose rewards are all equal, by what else attempts earned.
BEYOND_REWARDS = ("mt_grpo", "gdpo")
LOSS_NAMES = (
    "ppo_clip",
    "dual_clip",
    "clip_cov",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "dppo_kl",
    "importance_sampling",
)


class KlConfig(ConfigModel):
    """Penalty on leaving another policy."""

    # 0 switches it off.
    coefficient: float = Field(default=0.0, ge=0, le=1000)
    # `reference`: the policy that the run started with, which is then loaded too. `sampler`: the
    # one that wrote the token, by the engine's logprobs.
    to: Literal["reference", "sampler"] = "reference"
    # Estimator of KL(policy || the other) from sampled tokens.
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    # `loss`: a term of the loss, with its gradient. `reward`: subtracted from each token's reward.
    place: Literal["loss", "reward"] = "loss"

    @property
    def needs_reference(self) -> bool:
        return self.coefficient > 0 and self.to == "reference"

    @model_validator(mode="after")
    def _the_reward_has_a_reference(self) -> Self:
        if self.place == "reward" and self.to == "sampler":
            raise ValueError(
                'to: "sampler" needs place = "loss": the reward is fixed when a step starts, before'
                " the policy leaves its sampler"
            )
        return self


class CorrectionConfig(ConfigModel):
    """Corrections for tokens whose probability differs between trainer and engine.

    Ratios are trainer / sampler, with the trainer's logprobs at the start of a step. An absent
    key switches its correction off."""

    # Truncated importance sampling: the loss of a token is weighted by its ratio, at most this.
    token_tis: float | None = Field(default=None, gt=0, le=1e6)
    # The same with the product of a sequence's ratios.
    sequence_tis: float | None = Field(default=None, gt=0, le=1e6)
    # Tokens whose ratio lies outside get no gradient.
    token_mask: tuple[float, float] | None = None
    # Sequences whose product of ratios lies outside get no gradient.
    sequence_mask_product: tuple[float, float] | None = None
    # Sequences whose geometric mean of ratios lies outside get no gradient.
    sequence_mask_geometric: tuple[float, float] | None = None
    # A sequence that lags k versions has weight this ** k.
    staleness_decay: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _bounds_hold_one(self) -> Self:
        for name in ("token_mask", "sequence_mask_product", "sequence_mask_geometric"):
            bounds = getattr(self, name)
            if bounds is not None and not 0 <= bounds[0] < 1 < bounds[1] <= _MOST:
                raise ValueError(
                    f"{name}: expected [low, high] with 0 <= low < 1 < high <= {_MOST:g}; got"
                    f" {list(bounds)}"
                )
        if self.token_tis is not None and self.sequence_tis is not None:
            raise ValueError("sequence_tis: excludes token_tis: choose one")
        return self


class OverlongConfig(ConfigModel):
    """Treatment of attempts that were cut off."""

    # Attempts with these stop reasons carry no gradient; their rewards still count in their group.
    mask_stop_reasons: tuple[StopReason, ...] = ()
    # Neither do sequences with more tokens than this.
    mask_above_tokens: Tokens | None = None
    # Soft penalty: none up to `soft_limit - soft_buffer` policy tokens of an attempt, then
    # falling linearly to -1 times `soft_weight` at `soft_limit`.
    soft_limit: Tokens | None = None
    soft_buffer: int = Field(default=0, ge=0, le=MOST_TOKENS)
    soft_weight: float = Field(default=1.0, gt=0, le=1000)

    @model_validator(mode="after")
    def _the_buffer_is_part_of_the_limit(self) -> Self:
        if self.soft_limit is not None and not 0 < self.soft_buffer <= self.soft_limit:
            raise ValueError("soft_buffer: expected 1 to soft_limit tokens")
        return self


class ClipCovConfig(ConfigModel):
    """The tokens that `loss = "clip_cov"` holds back: some whose advantage goes with a high
    logprob."""

    # Share of an update's policy tokens that is held, at least one token.
    share: float = Field(default=2e-4, gt=0, le=1)
    # Covariances of advantage and logprob among which tokens are drawn.
    low: float = Field(default=1.0, ge=-_MOST, le=_MOST)
    high: float = Field(default=5.0, ge=-_MOST, le=_MOST)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"high: expected more than low, which is {self.low:g}")
        return self


class CriticConfig(ConfigModel):
    """The value model of `advantage = "gae"`, trained beside the policy."""

    # Constant: the schedule of `[learner.optimizer]` is for the policy only.
    lr: float = Field(default=1e-5, gt=0, le=1)
    # Discount and trace decay of generalised advantage estimation.
    discount: float = Field(default=1.0, gt=0, le=1)
    trace_decay: float = Field(default=1.0, ge=0, le=1)
    # Distance that a value may move from the one before the step.
    value_clip: float = Field(default=0.2, gt=0, le=1e6)
    # Steps in which only the critic learns.
    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)


class DistillationConfig(ConfigModel):
    """What is learned from the logprobs of `[learner.teacher]`; without one it has no effect."""

    # Of the divergence between the policy and the teacher, beside rewards.
    weight: float = Field(default=1.0, gt=0, le=1000)
    # Learn from the teacher only: rewards are measured, and move nothing.
    alone: bool = False
    # `reverse_kl`: KL(policy || teacher). `forward_kl`: KL(teacher || policy). `jsd`: the
    # generalised Jensen-Shannon divergence between them, with `beta`.
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    # Weight of the teacher in the mixture of jsd: near 0 it acts as forward_kl, near 1 as
    # reverse_kl.
    beta: float = Field(default=0.5, gt=0, lt=1)
    # 0: reverse_kl is estimated from the sampled tokens, as part of their advantages. Above: the
    # divergence over the teacher's likeliest tokens and all others as one is a term of the loss.
    # vLLM must be started with as many --max-logprobs, if above 20.
    top_k: int = Field(default=0, ge=0, le=128)

    @model_validator(mode="after")
    def _samples_estimate_one_divergence(self) -> Self:
        if self.divergence != "reverse_kl" and not self.top_k:
            raise ValueError(
                f'top_k: divergence = "{self.divergence}" is no mean over sampled tokens: set top_k'
                " to the number of the teacher's likeliest tokens, for example 16"
            )
        # Ranks read the whole table again, with all defaults.
        if "beta" in given_keys(self) and self.divergence != "jsd":
            raise ValueError('beta: only divergence = "jsd" mixes; leave it out')
        return self


class AlgorithmConfig(ConfigModel):
    """Advantage, loss and their settings."""

    # Modules that the ranks import, for custom estimators and losses.
    plugins: tuple[str, ...] = ()
    # Advantage estimator: grpo, dr_grpo, rloo, max_rl, opo, mt_grpo, reinforce_pp,
    # reinforce_pp_baseline, gdpo, gae, or a plugin's.
    advantage: str = "grpo"
    # Weights of the named rewards that gdpo learns from, which verifiers return beside the score.
    rewards: Mapping[RewardName, RewardWeight] = Field(default_factory=dict)
    # What mt_grpo multiplies the advantage of a turn's reward with.
    turn_coefficient: float = Field(default=1.0, gt=0, le=1000)
    # ppo_clip, dual_clip, clip_cov, gspo, cispo, sapo, dppo, dppo_kl, importance_sampling, or a
    # plugin's.
    loss: str = "ppo_clip"
    # Ratios are clipped from 1 - clip_low to 1 + clip_high; at 1 there is no lower bound. For dppo
    # they bound how far a token's probability may move, down and up; for dppo_kl, its binary KL.
    clip_low: float = Field(default=0.2, gt=0, le=1)
    # Above clip_low: clip-higher of DAPO.
    clip_high: float = Field(default=0.28, gt=0, le=1000)
    # Largest ratio at a negative advantage, for dual_clip.
    dual_clip: float = Field(default=3.0, gt=1, le=1000)
    clip_cov: ClipCovConfig = ClipCovConfig()
    # Temperatures of sapo's gates, at positive and negative advantages.
    sapo_positive: float = Field(default=1.0, gt=0, le=1000)
    sapo_negative: float = Field(default=1.05, gt=0, le=1000)
    # Denominator of the loss's ratio: the logprobs that the engine sampled with, or the trainer's
    # at the start of the step (decoupled PPO; one more forward pass if a step has several
    # updates).
    proximal: Literal["behaviour", "trainer"] = "behaviour"
    reduction: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum_norm"] = "token_mean"
    # Constant that sequence_mean_token_sum_norm divides by; absent: policy.max_model_len.
    norm_tokens: Tokens | None = None
    # Optimizer updates of a step: epochs * mini_batches (whole groups), then one publication.
    epochs: int = Field(default=1, ge=1, le=1000)
    mini_batches: Count = 1
    # Coefficient of an entropy bonus; below 0 it sharpens the policy.
    entropy_coefficient: float = Field(default=0.0, ge=-100, le=100)
    kl: KlConfig = KlConfig()
    correction: CorrectionConfig = CorrectionConfig()
    overlong: OverlongConfig = OverlongConfig()
    critic: CriticConfig = CriticConfig()
    distillation: DistillationConfig = DistillationConfig()

    @field_validator("advantage", "loss")
    @classmethod
    def _name_is_known(cls, name: str, info: ValidationInfo) -> str:
        """Check the name. With plugins any name is allowed: the ranks look it up when they
        start."""
        known = ADVANTAGE_NAMES if info.field_name == "advantage" else LOSS_NAMES
        if name not in known and not info.data.get("plugins"):
            raise ValueError(
                f"unknown {info.field_name}{did_you_mean(name, known)} (list the module of a"
                " custom one in algorithm.plugins)"
            )
        return name

    @model_validator(mode="after")
    def _named_rewards_have_their_estimator(self) -> Self:
        if self.advantage != "gdpo":
            if self.rewards and not self.plugins:
                raise ValueError('rewards: only advantage = "gdpo" learns from named rewards')
            return self
        if not self.rewards:
            raise ValueError(
                'rewards: advantage = "gdpo" needs the weights of named rewards, for example'
                " { correct = 1.0, style = 0.5 }"
            )
        in_reward = self.kl.coefficient > 0 and self.kl.place == "reward"
        if in_reward or self.overlong.soft_limit is not None:
            raise ValueError(
                'advantage: "gdpo" compares named rewards, which neither kl.place = "reward" nor'
                " overlong.soft_limit changes; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _samples_are_corrected_once(self) -> Self:
        tis = self.correction.token_tis is not None or self.correction.sequence_tis is not None
        if tis and self.proximal == "behaviour":
            raise ValueError(
                "correction.token_tis and sequence_tis weight a loss whose ratio is taken against "
                'the trainer: set proximal = "trainer"; the ratio against the behaviour policy '
                "corrects already"
            )
        return self
