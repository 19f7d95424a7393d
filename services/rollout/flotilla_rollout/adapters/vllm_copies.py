"""Copies of the first machine's files for workers on other machines, in vLLM's own processes.

One worker per machine receives a file into the machine's memory, where the others find it: bytes
cross the network once per machine, and are stored there once."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from flotilla_common.ray_cluster.node_folder import NodeFolder
from flotilla_common.tensors.tensor_checksum import checksum64
from flotilla_rollout.adapters.engine_cluster import MachineSite

# Bytes of one broadcast, so that gloo's buffers are smaller than the file.
_PIECE_BYTES = 64 * 2**20
_STALL_S = 120.0

# Name, offset in bytes, bytes, checksum.
CheckRow = tuple[str, int, int, int]


class FileCopies:
    """Membership of worker `rank` among those that copy files. All workers make the same calls in
    the same order."""

    def __init__(self, rank: int, workers: int) -> None:
        """Form the group of each machine's first worker."""
        self._each = MachineSite.of_this_process().each
        self._copies = rank % self._each == 0
        self._is_far = rank >= self._each
        self._path = NodeFolder.of_this_node().path / "weights"
        self._group: Any = dist.new_group(
            list(range(0, workers, self._each)),
            timeout=timedelta(seconds=_STALL_S),
            backend="gloo",
        )

    def copy_file(self, path: str, total_bytes: int, checks: Sequence[CheckRow]) -> str:
        """Copy the first machine's file to all; return why that failed, or "".

        Copies are checked before any use."""
        if not self._copies:
            return ""
        try:
            return self._copy(path, total_bytes, checks)
        # gloo's error if a machine is lost.
        except RuntimeError as error:
            return f"a machine did not receive it: {error}"

    def find(self, path: str) -> str:
        """Return this machine's path of the first machine's file."""
        return str(self._path) if self._is_far else path

    def drop(self) -> None:
        """Remove this machine's copy."""
        if self._is_far:
            self._path.unlink(missing_ok=True)

    def _copy(self, path: str, total_bytes: int, checks: Sequence[CheckRow]) -> str:
        why = _reserve(self._path, total_bytes) if self._is_far else ""
        if not self._all_agree(ready=not why):
            return why
        data = torch.from_file(self.find(path), shared=True, size=total_bytes, dtype=torch.uint8)
        for piece in data.split(_PIECE_BYTES):
            dist.broadcast(piece, src=0, group=self._group)
        return _find_damage(data, checks) if self._is_far else ""

    def _all_agree(self, *, ready: bool) -> bool:
        votes = torch.tensor([int(ready)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())


def _reserve(path: Path, size: int) -> str:
    """Create a file with all its bytes allocated; return why that failed, or ""."""
    path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"{size} bytes of weights do not fit in {path.parent}: {error}"
    return ""


def _find_damage(data: Tensor, checks: Sequence[CheckRow]) -> str:
    for name, offset, size, checksum in checks:
        if checksum64(data[offset : offset + size]) != checksum:
            return f"tensor {name} differs from its checksum"
    return ""
