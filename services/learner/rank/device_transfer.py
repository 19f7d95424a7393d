"""The way of a pack's numbers from the host to the device that computes with them."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; of a CPU it shares the array's memory.

    A GPU copies from locked memory by itself: the host goes on, to the pack after this one."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
