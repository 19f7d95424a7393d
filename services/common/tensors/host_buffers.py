"""Buffers in host memory for bytes that are received once."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# From a large page of the kernel's on: to touch as many small ones first takes longer than to copy.
_LARGE_BYTES = 2 * 2**20


def host_buffer(size: int) -> Tensor:
    """Return `size` bytes of host memory, uint8, of the value 0 or any other.

    They are given back when no tensor refers to them any more."""
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may be built without them.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
