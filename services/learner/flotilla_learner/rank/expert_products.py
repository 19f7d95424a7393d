"""Products of a mixture of experts in the compute dtype, like all other matrix products.

Autocast does not cover torch's grouped product, and transformers uses the dtype of its weights:
float32 masters would be multiplied in float32, unlike in the engine, and unlike on ranks that split
the model."""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

# Name by which transformers selects it by default.
_NAME = "grouped_mm"


def register() -> None:
    """Make transformers compute experts this way; may be called again."""
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
