"""Products of a mixture of experts in the compute dtype, as all other matrix products.

Autocast leaves torch's grouped product alone, and transformers takes the dtype of its weights: of
masters in float32 it would be computed in float32, unlike the engine's, and unlike that of ranks
that split the model."""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

# As transformers calls it, and chooses it by itself.
_NAME = "grouped_mm"


def register() -> None:
    """Have transformers compute experts so; may be called again."""
    ExpertsInterface.register(_NAME, _compute_experts)


class _CastExperts:
    """Experts whose weights are read in another dtype; gradients go to the masters."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        is_weight = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_weight else value


def _compute_experts(experts: Any, hidden: Tensor, *routes: Tensor) -> Tensor:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        experts = _CastExperts(experts, torch.get_autocast_dtype(kind))
    return grouped_mm_experts_forward(experts, hidden, *routes)
