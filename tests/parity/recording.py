"""Helpers of all peers' scripts: tensors of the inputs, and values with their gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every matrix as float64."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def with_gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> dict[str, Any]:
    """The value of a function and its gradient: that of the sum, when it gives a tensor."""
    leaf = at.clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return {"value": value.tolist(), "gradient": gradient.tolist()}
