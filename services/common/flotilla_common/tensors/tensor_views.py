"""Tensors within the bytes of a publication."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from flotilla_common.weights.fingerprint import ITEM_BYTES

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


def view_tensor(data: Tensor, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a view of this dtype and shape at `offset` of `data`, which is uint8.

    Raises KeyError for an unknown dtype."""
    kind = _DTYPES[dtype]
    return data[offset : offset + prod(shape) * kind.itemsize].view(kind).view(list(shape))
