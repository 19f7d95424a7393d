"""Activations that wait in host memory for the backward pass."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu


def activation_offload(device: torch.device, *, enabled: bool) -> AbstractContextManager[Any]:
    """Return the context of a forward pass whose saved tensors are kept in host memory.

    For recomputed blocks these are the inputs; what such a block computes for its own backward
    pass stays on the device."""
    return save_on_cpu(pin_memory=device.type == "cuda") if enabled else nullcontext()
