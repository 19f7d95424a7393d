"""The output head fused with the policy loss: the full logits matrix never exists.

The head is applied to policy tokens only, a chunk at a time. A token's loss depends on nothing but
its own logprob, so its gradient is known as soon as that logprob is: the gradients of the hidden
states and of the head are formed in the forward pass and nothing is computed twice (three matrix
products a chunk, where recomputation needs four).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (logprobs of a chunk, the chunk's place among the tokens) to the weighted loss of each token.
# A token's loss may depend on no logprob but its own.
TokenObjective = Callable[[Tensor, slice], Tensor]


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(hidden @ weight.T / temperature), [n, vocab], at least float32."""
    logits = (hidden @ weight.t()).to(_accumulation_dtype(hidden.dtype))
    logits.div_(temperature[:, None])
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _spans(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


@torch.no_grad()
def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, *, chunk: int
) -> Tensor:
    """Logprobs [n] of `targets` [n] given `hidden` [n, width]; float32, no gradient."""
    head = weight.to(hidden.dtype)
    parts = [
        _log_softmax(hidden[span], head, temperature[span])
        .gather(1, targets[span, None])
        .squeeze(1)
        for span in _spans(len(targets), chunk)
    ]
    return torch.cat(parts) if parts else temperature.new_zeros(0)


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    objective: TokenObjective,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed objective, and the logprob and entropy (nats) of each token.

    hidden [n, width], weight [vocab, width], targets [n] int64, temperature [n]. Only the loss
    carries a gradient, to `hidden` and `weight`. Logits are taken to float32 (float64 for
    float64 input) before the temperature; the head's gradient is accumulated in that type.
    """
    loss, logprobs, entropy = _FusedPolicyLoss.apply(
        hidden, weight, targets, temperature, objective, chunk
    )
    return loss, logprobs, entropy


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        objective: TokenObjective,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = _accumulation_dtype(hidden.dtype)
        head = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=precise)
        logprobs = hidden.new_empty(len(targets), dtype=precise)
        entropy = torch.empty_like(logprobs)
        loss = hidden.new_zeros((), dtype=precise)
        for span in _spans(len(targets), chunk):
            log_probs = _log_softmax(hidden[span], head, temperature[span])
            logprobs[span] = log_probs.gather(1, targets[span, None]).squeeze(1)
            part, slope = _value_and_slope(objective, logprobs[span], span)
            loss += part
            probs = log_probs.exp()
            entropy[span] = -torch.linalg.vecdot(probs, log_probs)
            grad = _logit_gradient(probs, targets[span], slope / temperature[span])
            grad = grad.to(hidden.dtype)
            torch.mm(grad, head, out=grad_hidden[span])
            _accumulate(grad_weight, grad, hidden[span])
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss, logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            grad_weight * scale.to(grad_weight.dtype),
            None,
            None,
            None,
            None,
        )


def _value_and_slope(
    objective: TokenObjective, logprobs: Tensor, span: slice
) -> tuple[Tensor, Tensor]:
    """The chunk's summed objective and its derivative by each logprob."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        total = objective(leaf, span).sum()
    (slope,) = torch.autograd.grad(total, leaf)
    return total.detach(), slope


def _logit_gradient(probs: Tensor, targets: Tensor, slope: Tensor) -> Tensor:
    """slope * d logprob / d logits = slope * (onehot - probs), written over `probs`."""
    grad = probs.mul_(-slope[:, None])
    grad.scatter_add_(1, targets[:, None], slope[:, None])
    return grad


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    if total.dtype == hidden.dtype:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden
