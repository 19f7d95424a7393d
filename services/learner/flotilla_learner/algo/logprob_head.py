"""The output head fused with the policy loss: the full logits matrix never exists.

The head is applied to policy tokens only, a chunk at a time. If a token's loss depends only on its
own logprob, its gradient is known as soon as that logprob is: the gradients of the hidden states
and of the head are formed in the forward pass and nothing is computed twice (three matrix products
a chunk, where recomputation needs four). An objective that couples the tokens of a sequence needs
all logprobs first: one pass for them and the fused one for the gradients (four).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flotilla_learner.algo.sampled_candidates import keep_candidates

# Logit of ids that are never sampled: its exponential is exactly 0, as that of minus infinity is,
# and their product is 0 and not NaN.
_NEVER = -1e30
# Maps (logprobs of a chunk, of the shape of its targets; the chunk's slice of the tokens) to
# weighted losses, of which the sum counts: of each target, or of each position.
# A token's loss may depend only on its own logprob, unless the objective is `coupled`: it is
# then called once, with all tokens.
TokenObjective = Callable[[Tensor, slice], Tensor]
# Change of the loss per nat of each token's entropy; called after the objective.
EntropyWeights = Callable[[slice], Tensor]


@dataclass(frozen=True, slots=True)
class _LossPlan:
    objective: TokenObjective
    entropy_weights: EntropyWeights | None
    coupled: bool
    chunk: int
    banned: Tensor | None
    candidates: Tensor | None


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _ChunkScores:
    """Scores one chunk after another in the same two matrices [chunk, vocab], at least float32.

    They are the largest tensors here: allocating them per chunk costs more than the computation."""

    def __init__(
        self, head: Tensor, rows: int, precise: torch.dtype, banned: Tensor | None
    ) -> None:
        self._head = head
        self._banned = banned
        self._log_probs, self._probs = (
            head.new_empty(rows, len(head), dtype=precise) for _ in range(2)
        )

    def score_chunk(
        self, hidden: Tensor, temperature: Tensor, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log softmax(hidden @ head.T / temperature) over the candidates [n, most] of each
        position, and its exponential, [n, vocab] each. They belong to the caller until the next
        chunk."""
        logits, probs = self._log_probs[: len(hidden)], self._probs[: len(hidden)]
        if logits.dtype == hidden.dtype:
            torch.mm(hidden, self._head.t(), out=logits)
        else:
            logits.copy_(hidden @ self._head.t())
        logits.div_(temperature[:, None])
        if self._banned is not None:
            logits.index_fill_(1, self._banned, _NEVER)
        if candidates is not None:
            keep_candidates(logits, candidates, _NEVER)
        # Not `softmax`: on a CPU it sums a row in as many float32 numbers as a vector has lanes,
        # and the unlikely tokens of a likely token's lane vanish.
        logits.sub_(logits.amax(-1, keepdim=True))
        total = torch.exp(logits, out=probs).sum(-1, keepdim=True)
        probs.div_(total)
        return logits.sub_(total.log_()), probs


def _chunk_spans(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


@torch.no_grad()
def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk: int,
    banned: Tensor | None = None,
    candidates: Tensor | None = None,
) -> Tensor:
    """Return logprobs of `targets` [n], or several at each position [n, k], given `hidden`
    [n, width]; float32, no gradient. Ids in `banned`, int64, are never sampled, and no targets.
    With `candidates` [n, most], int64 (see `join_candidates`), they are those among these alone."""
    precise = _accumulation_dtype(hidden.dtype)
    head, rows = weight.to(hidden.dtype), min(chunk, len(targets))
    scores = _ChunkScores(head, rows, precise, banned)
    logprobs = hidden.new_empty(targets.shape, dtype=precise)
    for span in _chunk_spans(len(targets), chunk):
        log_probs, _ = scores.score_chunk(hidden[span], temperature[span], _part(candidates, span))
        logprobs[span] = _gather_targets(log_probs, targets[span])
    return logprobs


def _part(rows: Tensor | None, span: slice) -> Tensor | None:
    return None if rows is None else rows[span]


def _gather_targets(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return the values [n, vocab] at `targets` [n] or [n, k], in their shape."""
    return log_probs.gather(1, targets.view(len(targets), -1)).view(targets.shape)


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    objective: TokenObjective,
    *,
    chunk: int,
    coupled: bool = False,
    entropy_weights: EntropyWeights | None = None,
    banned: Tensor | None = None,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed objective, the logprob of each target, and each position's entropy (nats).

    hidden [n, width], weight [vocab, width], targets [n] int64, temperature [n]. With several
    targets at each position they are [n, k], and so are the logprobs. Only the loss
    carries a gradient, to `hidden` and, unless it is frozen, `weight`. Logits are cast to float32
    (float64 for float64 input) before the temperature; the head's gradient is accumulated in that
    type.
    With `entropy_weights` the loss includes their product with the entropies, whose gradient is
    that of the full distribution and not of the sampled tokens. Ids in `banned`, int64, have the
    probability 0 in it, and are no targets; so have, with `candidates` [n, most], int64 (see
    `join_candidates`), all ids that are not among those of their position."""
    plan = _LossPlan(objective, entropy_weights, coupled, chunk, banned, candidates)
    loss, logprobs, entropy = _FusedPolicyLoss.apply(hidden, weight, targets, temperature, plan)
    return loss, logprobs, entropy


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        plan: _LossPlan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = _accumulation_dtype(hidden.dtype)
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        # A frozen head, as under adapters, gets no gradient, which may be the largest matrix.
        learns = ctx.needs_input_grad[1]
        begin = torch.empty_like if len(targets) else torch.zeros_like
        grad_weight = begin(weight, dtype=precise) if learns else None
        logprobs = hidden.new_empty(targets.shape, dtype=precise)
        entropy = hidden.new_empty(len(targets), dtype=precise)
        loss = hidden.new_zeros((), dtype=precise)
        derive = _make_derivative(plan, hidden, weight, targets, temperature)
        scores = _ChunkScores(head, min(plan.chunk, len(targets)), precise, plan.banned)
        for span in _chunk_spans(len(targets), plan.chunk):
            among = _part(plan.candidates, span)
            log_probs, probs = scores.score_chunk(hidden[span], temperature[span], among)
            logprobs[span] = _gather_targets(log_probs, targets[span])
            # A row's dot product, without the matrix of all products.
            entropy[span] = -torch.bmm(probs[:, None], log_probs[:, :, None]).view(-1)
            values, slope = derive(logprobs[span], span)
            loss += values.sum()
            places = targets[span].view(len(slope), -1)
            slopes = slope.view(places.shape)
            pull = slopes.sum(1, keepdim=True)
            if plan.entropy_weights is not None:
                bonus = plan.entropy_weights(span)
                loss += torch.dot(bonus, entropy[span])
                # d entropy / d logits = -p * (log p + entropy)
                pull = log_probs.add_(entropy[span, None]).mul_(bonus[:, None]).add_(pull)
            # slope * d logprob / d logits = slope * (onehot - p), summed over a position's targets
            grad = probs.mul_(pull.neg() / temperature[span, None])
            grad.scatter_add_(1, places, slopes / temperature[span, None])
            grad = grad.to(hidden.dtype)
            torch.mm(grad, head, out=grad_hidden[span])
            if grad_weight is not None:
                _accumulate_gradient(grad_weight, grad, hidden[span], first=span.start == 0)
        ctx.save_for_backward(
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        )
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            None,
            None,
            None,
        )


def _make_derivative(
    plan: _LossPlan, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor
) -> Callable[[Tensor, slice], tuple[Tensor, Tensor]]:
    """Return a function that gives each token's loss in a chunk and its derivative.

    The derivative is with respect to the token's logprob."""
    if not plan.coupled:
        return lambda logprobs, span: _values_and_slope(plan.objective, logprobs, span)
    limits = {"banned": plan.banned, "candidates": plan.candidates}
    logprobs = token_logprobs(hidden, weight, targets, temperature, chunk=plan.chunk, **limits)
    values, slope = _values_and_slope(plan.objective, logprobs, slice(0, len(targets)))
    return lambda _, span: (values[span], slope[span])


def _values_and_slope(
    objective: TokenObjective, logprobs: Tensor, span: slice
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        values = objective(leaf, span)
        (slope,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slope


def _accumulate_gradient(total: Tensor, grad: Tensor, hidden: Tensor, *, first: bool) -> None:
    """Add a chunk's gradient to that of the previous chunks; with `first`, prior content is
    ignored."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad.t(), hidden, beta=0 if first else 1)
    elif first:
        total.copy_(grad.t() @ hidden)
    else:
        total += grad.t() @ hidden
