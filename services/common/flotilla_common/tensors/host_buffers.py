"""Buffers in host memory for data that is received once."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

# The size of a large kernel page: touching as many small ones takes longer than the copy.
_LARGE_BYTES = 2 * 2**20


def host_buffer(size: int) -> Tensor:
    """Return `size` bytes of host memory as uint8, with undefined content.

    The memory is freed once no tensor refers to it."""
    if size < _LARGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may be built without large pages.
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
