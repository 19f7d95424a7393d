"""Checksums of tensors that ranks hold in parts: each rank sums its own part in place.

The published file holds gathered bytes, but its checksums do not come from them: if a gather
corrupts a bit, the bytes no longer match, and every engine refuses them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from flotilla_common.tensors.tensor_checksum import CHECKSUM_MASK, checksum64
from flotilla_learner.rank.sharding import local_slices

# A part may start at any multiple of two words.
_ALIGNMENT = 16
_HALF = (1 << 32) - 1


class ShardChecksums:
    """Checksums of tensors, in the order in which all ranks add them."""

    def __init__(self) -> None:
        self._parts: list[int] = []
        # Places of those that every rank holds whole.
        self._unsplit: list[int] = []
        # Ranks that hold the parts of one copy; None while no tensor is split.
        self._group: Any = None
        self._device = torch.device("cpu")

    def add_tensor(self, near: Tensor, whole: Tensor) -> None:
        """Add a tensor that this rank holds as `near`; gathered it is `whole`."""
        if not isinstance(near, DTensor):
            self._unsplit.append(len(self._parts))
            self._parts.append(_checksum_bytes(whole))
            return
        self._group = near.device_mesh.get_group(near.device_mesh.ndim - 1)
        self._device = whole.device
        if _has_aligned_parts(near):
            start = local_slices(near)[0].start * _row_bytes(near)
            self._parts.append(_checksum_bytes(near.to_local(), start))
        else:
            first = dist.get_rank(self._group) == 0
            self._parts.append(_checksum_bytes(whole) if first else 0)

    def sum_parts(self) -> list[int]:
        """Return the checksum of each tensor. Collective if any tensor is split."""
        if self._group is None:
            return self._parts
        if dist.get_rank(self._group) > 0:
            for place in self._unsplit:
                self._parts[place] = 0
        # Halves, so that no sum overflows.
        halves = [[part & _HALF, part >> 32] for part in self._parts]
        sums = torch.tensor(halves, dtype=torch.int64, device=self._device)
        dist.all_reduce(sums, group=self._group)
        return [(low + (high << 32)) & CHECKSUM_MASK for low, high in sums.tolist()]


def _checksum_bytes(tensor: Tensor, start: int = 0) -> int:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return checksum64(raw, start)


def _has_aligned_parts(tensor: DTensor) -> bool:
    """Return True if each rank holds rows whose bytes begin and end at whole pairs of words."""
    *outer, inner = tensor.placements
    in_rows = inner == Shard(0) and all(each == Replicate() for each in outer)
    return in_rows and _row_bytes(tensor) % _ALIGNMENT == 0


def _row_bytes(tensor: DTensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()
