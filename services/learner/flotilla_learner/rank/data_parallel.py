"""Data-parallel ranks: assignment of sequences, and sums over the ranks' results."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from flotilla_common.spec.config import ConfigModel
from flotilla_learner.algo.packing import spread_evenly
from flotilla_learner.rank.rendezvous_store import Store, connect_store, meet_ranks

# Longest wait for the slowest rank; the service notices a dead one within seconds.
_PATIENCE = timedelta(hours=1)


class RankPlacement(ConfigModel):
    """Place of a process among a run's ranks."""

    index: int
    count: int
    # Meeting point of the ranks, see `rendezvous_store`.
    rendezvous: str
    # Index among its machine's ranks, and their number.
    slot: int
    slots: int

    @property
    def spans_machines(self) -> bool:
        """True if some ranks are on other machines: they share no files and no memory."""
        return self.slots < self.count


class Replicas:
    """All ranks of a run, as seen by one of them. A single rank leaves every sum unchanged.

    All ranks must call the same methods in the same order. Sums have the same bits on every rank,
    and in every run with as many ranks on one kind of CPU."""

    def __init__(self, index: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.index = index
        self.count = count
        self._device = device or torch.device("cpu")

    @staticmethod
    def join_process_group(
        place: RankPlacement, device: torch.device, store: Store | None = None
    ) -> "Replicas":
        """Join the other ranks: over gloo on CPUs, over NCCL on GPUs.

        `store` is the one that this rank hosts for all, if it does. Raises MeetingError."""
        store = store or connect_store(place.rendezvous, place.count)
        if place.spans_machines:
            meet_ranks(store, place.rendezvous, place.index, place.count)
        dist.init_process_group(
            # Tensors in host memory are summed by gloo.
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.index,
            world_size=place.count,
            timeout=_PATIENCE,
        )
        return Replicas(place.index, place.count, device)

    def assign_sequences(self, lengths: Sequence[int]) -> list[int]:
        """Return the indices of the sequences that this rank computes.

        A pure function of lengths, index and count; see `spread_evenly`."""
        return spread_evenly(lengths, self.count)[self.index]

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor with its sum over all ranks."""
        if self.count == 1:
            return
        for tensor in tensors:
            dist.all_reduce(tensor)

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Replace the tensor with the first rank's, on any device."""
        if self.count == 1:
            return
        moved = tensor.to(self._device)
        dist.broadcast(moved, 0)
        if moved is not tensor:
            tensor.copy_(moved)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Return the bytes that the first rank passes; the others pass None."""
        size = torch.tensor([len(data or b"")], dtype=torch.int64)
        self.broadcast_tensor(size)
        # The buffer must be writable, and at least a byte long.
        buffer = bytearray(data or bytes(int(size)))
        if buffer:
            self.broadcast_tensor(torch.frombuffer(buffer, dtype=torch.uint8))
        return bytes(buffer)

    def sum_numbers(self, *values: float) -> list[float]:
        """Return the sums of plain numbers over all ranks, in float64."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self.all_reduce([numbers])
        return numbers.tolist()

    def largest_number(self, value: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.count == 1:
            return value
        numbers = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def gather_arrays(
        self, own: Mapping[int, NDArray[np.float32]], lengths: Mapping[int, int]
    ) -> dict[int, NDArray[np.float32]]:
        """Return arrays by key, from those that each rank computed; keys without any are left out.

        `lengths` are those of all keys' arrays, in the same order on every rank. Values arrive
        unchanged, including NaN."""
        if self.count == 1 or not lengths:
            return {key: own[key] for key in lengths if key in own}
        ends = np.cumsum(list(lengths.values()), dtype=np.int64)
        values = np.zeros(int(ends[-1]), np.float32)
        parts = dict(zip(lengths, np.split(values, ends[:-1]), strict=True))
        for key, array in own.items():
            parts[key][:] = array
        summed = torch.from_numpy(values).to(self._device)
        self.all_reduce([summed])
        values[:] = summed.cpu().numpy()
        there = self.sum_numbers(*(float(key in own) for key in lengths))
        return {key: parts[key] for key, ranks in zip(lengths, there, strict=True) if ranks}
