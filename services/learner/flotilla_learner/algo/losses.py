"""Policy losses per token, as functions of the logprobs under the parameters being trained.

ratio = exp(logprobs - old), where `old` are the logprobs of the reference point of the ratio:
the sampling policy (`proximal = "behaviour"`), so that the clip also bounds the effect of stale
or mismatched samples, or the trainer at the start of the step (`proximal = "trainer"`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla_learner.algo.held_tokens import TokenChoice, draw_covariant
from flotilla_learner.algo.plugin_registry import Registry
from flotilla_learner.algo.sequences import sequence_means
from flotilla_learner.config.algorithm import AlgorithmConfig

# exp() of a larger log-ratio carries no information but "far off" and overflows later.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossInput:
    """Policy tokens [n]; only `logprobs` carries a gradient."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    # int64: index of the token's sequence, below `count`.
    sequence: Tensor
    count: int
    # Tokens that the loss's choice holds back (bool); None: it has chosen none.
    held: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token [n], and the mask of tokens where the clip took effect [n] (bool)."""

    loss: Tensor
    clipped: Tensor


# A token with advantage 0 must have loss and gradient 0: groups without a signal may be left out.
PolicyLoss = Callable[[LossInput, AlgorithmConfig], TokenLoss]


class LossRegistry(Registry[PolicyLoss]):
    """Losses, which of them couple the tokens of a sequence, and which hold tokens back."""

    def __init__(self) -> None:
        super().__init__("loss")
        self._coupled: set[str] = set()
        self._choices: dict[str, TokenChoice] = {}

    def register(
        self, name: str, *, coupled: bool = False, holds: TokenChoice | None = None
    ) -> Callable[[PolicyLoss], PolicyLoss]:
        """Register a loss.

        `coupled`: a token's loss depends on logprobs of its sequence other than its own. `holds`:
        what chooses the tokens `LossInput.held` of each update."""
        if coupled:
            self._coupled.add(name)
        if holds is not None:
            self._choices[name] = holds
        return super().register(name)

    def is_coupled(self, name: str) -> bool:
        """Return True if the loss must see whole sequences."""
        return name in self._coupled

    def find_choice(self, name: str) -> TokenChoice | None:
        """Return what chooses the tokens that the loss holds back, if it holds any."""
        return self._choices.get(name)


LOSSES = LossRegistry()


def log_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """log(pi / behaviour) of each token, clamped to +-20."""
    return (logprobs - behaviour).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


@LOSSES.register("ppo_clip")
def ppo_clip(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    PPO, arXiv 1707.06347, equation 7; with clip_high > clip_low the clip-higher of DAPO,
    arXiv 2503.14476, equation 10.
    """
    return _clipped_loss(log_ratio(tokens.logprobs, tokens.old).exp(), tokens.advantages, config)


@LOSSES.register("dual_clip")
def dual_clip(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """ppo_clip, and at A < 0 never more than -dual_clip * A.

    Dual-clip PPO, arXiv 1912.09729: otherwise a bad token that became far more likely would
    have an unbounded loss.
    """
    inner = ppo_clip(tokens, config)
    most = -config.dual_clip * tokens.advantages
    capped = (tokens.advantages < 0) & (inner.loss > most)
    return TokenLoss(torch.where(capped, most, inner.loss), inner.clipped | capped)


@LOSSES.register("clip_cov", holds=draw_covariant)
def clip_cov(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """ppo_clip, and 0 for the tokens that `draw_covariant` has chosen.

    Clip-Cov, arXiv 2505.22617: it keeps the policy's entropy from collapsing."""
    inner = ppo_clip(tokens, config)
    if tokens.held is None:
        return inner
    return TokenLoss(inner.loss * ~tokens.held, inner.clipped | tokens.held)


@LOSSES.register("gspo", coupled=True)
def gspo(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """ppo_clip with the ratio of the sequence, s = exp(mean over its tokens of log ratio).

    GSPO, arXiv 2507.18071, equations 5 and 7, in its token form GSPO-token, equations 13 and 14:
    sg[s] * pi / sg[pi], whose value is s and whose gradient by a token's logprob is s times
    that of the token. If a sequence's tokens share advantage and weight, loss and gradient are
    GSPO's own. A token that a correction masks counts in s and gets no gradient, unlike in GSPO's
    own form.
    """
    means = sequence_means((tokens.logprobs - tokens.old).detach(), tokens.sequence, tokens.count)
    shared = means.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)[tokens.sequence]
    through = tokens.logprobs - tokens.logprobs.detach()
    return _clipped_loss((shared + through).exp(), tokens.advantages, config)


@LOSSES.register("cispo")
def cispo(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * logprob.

    CISPO of MiniMax-M1, arXiv 2506.13585, equations 4 and 5: the weight is clipped, the gradient
    never. A clip_low of 1 or more leaves the weight without a lower bound, as in the paper.
    """
    ratio = log_ratio(tokens.logprobs, tokens.old).exp().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, weight != ratio)


@LOSSES.register("sapo")
def sapo(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """-(4 / tau) * sigmoid(tau * (ratio - 1)) * A, tau = sapo_positive if A > 0, else _negative.

    SAPO, arXiv 2511.20347: a gate that closes smoothly where a clip cuts.
    On policy its gradient is that of REINFORCE; nothing is ever clipped.
    """
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    tau = torch.full_like(ratio, config.sapo_negative)
    tau = tau.masked_fill(tokens.advantages > 0, config.sapo_positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return TokenLoss(-gate * tokens.advantages, torch.zeros_like(ratio, dtype=torch.bool))


@LOSSES.register("dppo")
def dppo(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """-ratio * A, and 0 for a token whose probability has moved too far in A's direction: up by
    more than clip_high at A > 0, down by more than clip_low at A < 0.

    DPPO with the binary total variation, arXiv 2602.04879: a bound on ratios constrains rare
    tokens too tightly, and likely ones hardly at all."""
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    moved = (tokens.logprobs.exp() - tokens.old.exp()).detach()
    up, down = moved > config.clip_high, moved < -config.clip_low
    outside = (tokens.advantages > 0) & up | (tokens.advantages < 0) & down
    return TokenLoss(-ratio * tokens.advantages * ~outside, outside)


@LOSSES.register("dppo_kl")
def dppo_kl(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """-ratio * A, and 0 for a token that has moved too far in A's direction: up at A > 0 with a
    binary KL above clip_high, down at A < 0 with one above clip_low.

    DPPO with the binary KL, arXiv 2602.04879, equation 14: like `dppo`, with the divergence
    KL(old || policy) between "this token" and "any other"."""
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    now = tokens.logprobs.detach()
    divergence = _binary_kl(tokens.old, now)
    up = (now > tokens.old) & (divergence > config.clip_high)
    down = (now < tokens.old) & (divergence > config.clip_low)
    outside = (tokens.advantages > 0) & up | (tokens.advantages < 0) & down
    return TokenLoss(-ratio * tokens.advantages * ~outside, outside)


@LOSSES.register("importance_sampling")
def importance_sampling(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """-ratio * A, the surrogate of arXiv 1707.06347, equation 6. Unbounded."""
    ratio = log_ratio(tokens.logprobs, tokens.old).exp()
    return TokenLoss(-ratio * tokens.advantages, torch.zeros_like(ratio, dtype=torch.bool))


def negative_log_likelihood(tokens: LossInput, config: AlgorithmConfig) -> TokenLoss:
    """-A * logprob: at an advantage of 1 the cross entropy of a demonstration's tokens. There is no
    ratio, because nobody sampled them from a policy that the loss could compare with.

    Not registered: the loss of demonstrations is no choice of `[learner.algorithm]`."""
    loss = -tokens.advantages * tokens.logprobs
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def _binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """Return q log(q / p) + (1 - q) log((1 - q) / (1 - p)) of q = exp(old), p = exp(new); [n].

    With its limits at probabilities of 0 and 1, which float32 reaches. At most 0 is taken for a
    logprob, since engines round some up."""
    old, new = old.clamp(max=0), new.clamp(max=0)
    chosen, others = old.exp(), -torch.expm1(old)
    this = torch.xlogy(chosen, chosen) - chosen * new
    return this + torch.xlogy(others, others) - torch.xlogy(others, -torch.expm1(new))


def _clipped_loss(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> TokenLoss:
    return clipped_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> TokenLoss:
    """Return -min(ratio * A, clip(ratio, low, high) * A), PPO's loss."""
    plain = ratio * advantages
    bounded = ratio.clamp(low, high) * advantages
    return TokenLoss(-torch.minimum(plain, bounded), bounded < plain)
