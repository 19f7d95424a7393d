"""Tensors within the bytes of a publication."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

# By their names in a manifest.
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def view_tensor(data: Tensor, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a view of this dtype and shape at `offset` of `data`, which is uint8.

    Raises KeyError for an unknown dtype."""
    kind = _DTYPES[dtype]
    return data[offset : offset + prod(shape) * kind.itemsize].view(kind).view(list(shape))
