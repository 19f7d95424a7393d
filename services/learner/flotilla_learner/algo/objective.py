"""The whole objective of a policy update: loss, corrections, masks, KL penalty, entropy bonus.

The term of a token is w * (c * loss(ratio, A) + coefficient * KL - entropy_coefficient * H), with
w from `reductions` and c from `corrections`; it is 0 where a correction masks the token. In a step
that is distilled over a teacher's likeliest tokens, weight * `token_divergence` is added. With
`proximal = "trainer"` and c = min(proximal / behaviour, cap) this is decoupled PPO,
-c * min(u A, clip(u) A) with u = policy / proximal (arXiv 2110.00641; for asynchronous training
AReaL, arXiv 2505.24298).
A step's `Objective` lists the inputs it needs beforehand; its `make_pack_loss` returns the weighted
loss of one pack's tokens, in the form that the fused head takes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from flotilla_learner.algo.corrections import (
    Correction,
    CorrectionInput,
    compute_correction,
    needs_sequences,
    needs_trainer_logprobs,
)
from flotilla_learner.algo.distillation import token_divergence
from flotilla_learner.algo.kl import kl_penalty
from flotilla_learner.algo.losses import (
    LOSSES,
    LossInput,
    PolicyLoss,
    TokenLoss,
    negative_log_likelihood,
)
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.types import StepSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class PackTokens:
    """Policy tokens of a pack, in whole sequences; every tensor is [n]."""

    # Logprobs of the policy that sampled.
    behaviour: Tensor
    advantages: Tensor
    # Weight of each token in the loss, from `reductions`.
    weights: Tensor
    # int64: index of the token's sequence, below the pack's `count`.
    sequence: Tensor
    count: int
    # Versions by which the sequence's policy lagged.
    staleness: Tensor
    # Logprobs of the trainer at the start of the step. None: the parameters have not moved since.
    proximal: Tensor | None = None
    # Logprobs of the reference policy, if `needs_reference_logprobs`.
    reference: Tensor | None = None
    # Tokens that the loss holds back (bool), if it `chooses_tokens`.
    held: Tensor | None = None
    # The teacher's logprobs [n, k] of its likeliest tokens, if the objective `compares_tokens`.
    teacher: Tensor | None = None


def add_fields(one: S, other: S) -> S:
    """Return the sum of two instances of a dataclass of sums, field by field."""
    return type(one)(*(getattr(one, f.name) + getattr(other, f.name) for f in fields(one)))


@dataclass(frozen=True, slots=True)
class ObjectiveSums:
    """Sums over tokens, so that packs and ranks add up exactly."""

    tokens: int = 0
    # Tokens where the loss's clip took effect.
    clipped: int = 0
    # Tokens that a correction masked, and sequences that it masked entirely.
    masked: int = 0
    masked_sequences: int = 0
    sequences: int = 0
    # Sum of the corrections' weights, of the estimates of the penalty's KL, and of the divergences
    # from the teacher.
    weight: float = 0.0
    kl: float = 0.0
    divergence: float = 0.0

    @staticmethod
    def from_figures(figures: Sequence[float]) -> "ObjectiveSums":
        """Return the sums with these field values, in order."""
        tokens, clipped, masked, masked_sequences, sequences = (int(count) for count in figures[:5])
        return ObjectiveSums(tokens, clipped, masked, masked_sequences, sequences, *figures[5:])

    def __add__(self, other: "ObjectiveSums") -> "ObjectiveSums":
        return add_fields(self, other)


class Objective:
    """The objective that one step's updates minimise.

    That of demonstrations (`imitated`) is their negative log-likelihood and nothing else of the
    config. Raises ValueError for an unregistered loss."""

    def __init__(
        self,
        config: AlgorithmConfig,
        settings: StepSettings | None = None,
        *,
        imitated: bool = False,
    ) -> None:
        self._config = AlgorithmConfig() if imitated else config
        self._ratio_limit = settings.ratio_limit if settings else None
        self._taught = settings is not None and settings.taught
        self._loss = negative_log_likelihood if imitated else LOSSES.get(config.loss)

    @property
    def needs_reference_logprobs(self) -> bool:
        """True if the reference policy's logprobs are needed."""
        return self._config.kl.needs_reference

    @property
    def needs_proximal_logprobs(self) -> bool:
        """True if the trainer's logprobs must be computed before the first update.

        Not for a single update, which computes the same values itself, unless the loss must choose
        tokens among them first."""
        config = self._config
        in_reward = self.needs_reference_logprobs and config.kl.place == "reward"
        wanted = config.proximal == "trainer" or needs_trainer_logprobs(
            config.correction, self._ratio_limit
        )
        several = config.epochs * config.mini_batches > 1
        return in_reward or self.chooses_tokens or (wanted and several)

    @property
    def chooses_tokens(self) -> bool:
        """True if the loss holds tokens back that are chosen among all of an update."""
        return LOSSES.find_choice(self._config.loss) is not None

    @property
    def compares_tokens(self) -> bool:
        """True if the loss needs the logprobs of the teacher's likeliest tokens, besides those of
        the sampled ones."""
        return self._taught and self._config.distillation.top_k > 0

    @property
    def coupled(self) -> bool:
        """True if a token's loss depends on logprobs of its sequence other than its own."""
        by_correction = (
            needs_sequences(self._config.correction) and not self.needs_proximal_logprobs
        )
        return LOSSES.is_coupled(self._config.loss) or by_correction

    @property
    def moves_without_advantage(self) -> bool:
        """True if tokens with advantage 0 have a gradient too."""
        in_loss = self._config.kl.coefficient > 0 and self._config.kl.place == "loss"
        return in_loss or self.compares_tokens or self._config.entropy_coefficient != 0

    def make_pack_loss(self, tokens: PackTokens) -> "PackLoss":
        """Return the loss of one pack. Raises ValueError if reference logprobs are missing."""
        if self.needs_reference_logprobs and tokens.reference is None:
            raise ValueError("a KL penalty needs the reference policy's logprobs")
        if self.compares_tokens and tokens.teacher is None:
            raise ValueError(
                "a distilled step needs the logprobs of the teacher's likeliest tokens"
            )
        return PackLoss(self._loss, self._config, self._ratio_limit, tokens)


class PackLoss:
    """Weighted loss of a pack's tokens, called by the fused head, and statistics of them.

    `clipped`, `kept` (bool), `correction`, `kl` and `divergence` are [n], filled as the chunks are
    computed.
    """

    def __init__(
        self,
        loss: PolicyLoss,
        config: AlgorithmConfig,
        ratio_limit: float | None,
        tokens: PackTokens,
    ) -> None:
        self._loss = loss
        self._config = config
        self._ratio_limit = ratio_limit
        self._tokens = tokens
        self.clipped = torch.zeros_like(tokens.sequence, dtype=torch.bool)
        self.kept = torch.zeros_like(self.clipped)
        self.correction = torch.zeros_like(tokens.weights)
        self.kl = torch.zeros_like(tokens.weights)
        self.divergence = torch.zeros_like(tokens.weights)
        self._whole = (
            None
            if tokens.proximal is None
            else self._compute_correction(tokens.proximal, slice(None))
        )

    def __call__(self, logprobs: Tensor, span: slice) -> Tensor:
        """Return the weighted loss of the tokens in `span`, differentiable by `logprobs`: [m], or
        [m, 1 + k] with those of the teacher's k likeliest tokens after the sampled one's.

        A masked token has loss and gradient exactly 0, whatever its logprob. A NaN logprob is
        never masked: the loss is then NaN, and the update must be refused.
        """
        sampled = logprobs if logprobs.dim() == 1 else logprobs[:, 0]
        now = sampled.detach()
        correction = self._chunk_correction(now, span)
        # Only kept tokens pass a gradient on, even where a derivative is not finite.
        moving = torch.where(correction.kept, sampled, now)
        result = self._policy_loss(moving, now, span)
        loss = result.loss * correction.weights + self._kl_loss_term(moving, span)
        if logprobs.dim() > 1:
            loss = loss + self._teacher_loss_term(logprobs[:, 1:], correction.kept, span)
        self.kept[span] = correction.kept
        self.clipped[span] = result.clipped & correction.kept
        self.correction[span] = correction.weights
        return torch.where(correction.kept, loss, 0.0) * self._tokens.weights[span]

    def _policy_loss(self, moving: Tensor, now: Tensor, span: slice) -> TokenLoss:
        tokens = self._tokens
        given = LossInput(
            moving,
            self._proximal_logprobs(now, span),
            tokens.advantages[span],
            tokens.sequence[span],
            tokens.count,
            None if tokens.held is None else tokens.held[span],
        )
        return self._loss(given, self._config)

    def _kl_loss_term(self, moving: Tensor, span: slice) -> Tensor | float:
        """Return the KL penalty's part of the loss; also measured if it is part of the reward."""
        kl = self._config.kl
        other = self._tokens.behaviour if kl.to == "sampler" else self._tokens.reference
        if kl.coefficient == 0 or other is None:
            return 0.0
        penalty = kl_penalty(moving, other[span], kl.estimator)
        self.kl[span] = penalty.detach()
        return kl.coefficient * penalty if kl.place == "loss" else 0.0

    def _teacher_loss_term(self, likeliest: Tensor, kept: Tensor, span: slice) -> Tensor:
        """Return the divergence's part of the loss, from the policy's logprobs [m, k]."""
        teacher = self._tokens.teacher
        assert teacher is not None, "an objective that compares tokens was given the teacher's"
        moving = torch.where(kept[:, None], likeliest, likeliest.detach())
        found = token_divergence(moving, teacher[span], self._config.distillation)
        self.divergence[span] = found.detach()
        return self._config.distillation.weight * found

    @property
    def applied(self) -> Tensor:
        """The weight that the corrections gave each token's loss, 0 where they masked it; [n]."""
        return torch.where(self.kept, self.correction, 0.0)

    def entropy_weights(self, span: slice) -> Tensor:
        """Change of the loss per nat of each token's entropy; call it after the loss of the span.

        The bonus of PPO, arXiv 1707.06347, equation 9."""
        weights = self._tokens.weights[span]
        return torch.where(self.kept[span], -self._config.entropy_coefficient * weights, 0.0)

    def measure(self) -> Tensor:
        """Return what the tokens add to the metrics, for `ObjectiveSums.from_figures`.

        The figures stay on the tokens' device, because reading them would block on it."""
        tokens = self._tokens
        left = torch.zeros(tokens.count, dtype=torch.int64, device=self.kept.device)
        left.index_add_(0, tokens.sequence, self.kept.long())
        found = torch.zeros(8, dtype=torch.float64, device=self.kept.device)
        found[0], found[4] = self.kept.numel(), tokens.count
        for place, values in (
            (1, self.clipped),
            (2, ~self.kept),
            (3, left == 0),
            (5, self.correction.double()),
            (6, self.kl.double()),
            (7, self.divergence.double()),
        ):
            found[place] = values.sum()
        return found

    def _proximal_logprobs(self, now: Tensor, span: slice) -> Tensor:
        if self._config.proximal == "behaviour":
            return self._tokens.behaviour[span]
        return now if self._tokens.proximal is None else self._tokens.proximal[span]

    def _chunk_correction(self, now: Tensor, span: slice) -> Correction:
        if self._whole is None:
            return self._compute_correction(now, span)
        return Correction(self._whole.weights[span], self._whole.kept[span])

    def _compute_correction(self, trainer: Tensor, span: slice) -> Correction:
        tokens = self._tokens
        found = CorrectionInput(
            trainer,
            tokens.behaviour[span],
            tokens.sequence[span],
            tokens.count,
            tokens.staleness[span],
        )
        return compute_correction(found, self._config.correction, self._ratio_limit)
