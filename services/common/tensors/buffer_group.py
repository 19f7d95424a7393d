"""Groups of one sender and the workers of one engine on the sender's own devices: pieces go through
buffers that both sides have mapped.

Each worker has buffers of its own, filled in turn. The store says which are filled and which have
been read, so whoever waits for a process that is lost waits no longer than the store's timeout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from services.common.tensors.shared_buffers import (
    BufferOffer,
    BufferPool,
    SharedBuffer,
    finish_copies,
    identify_device,
    read_offer,
)

# One is filled while the other is read.
_BUFFERS = 2


class BufferSender:
    """The sender's side. Implements `transfer_group.TransferGroup`."""

    def __init__(self, store: Any, workers: int, pool: BufferPool) -> None:
        """Meet all workers at `store`, which is the group's own. Raises RuntimeError."""
        self._store = store
        self._pool = pool
        self._workers = range(workers)
        # By worker: its device's identity, and its buffers.
        self._lent: list[tuple[str, list[SharedBuffer]]] = []
        self._sent = self._read = 0
        try:
            self._offer_buffers()
        except RuntimeError:
            self.abort()
            raise

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Bring a piece into a buffer of each worker, once that has been read.

        Return what waits until all have read this one."""
        self._wait_until_read(self._sent - _BUFFERS + 1)
        for _, buffers in self._lent:
            _part_of(buffers[self._sent % _BUFFERS].data, tensor).copy_(tensor)
        for index, (_, buffers) in enumerate(self._lent):
            finish_copies(buffers[0].data.device)
            self._store.queue_push(f"filled/{index}", "")
        self._sent += 1
        return partial(self._wait_until_read, self._sent)

    def abort(self) -> None:
        """Give the group up: its buffers are lent to others."""
        lent, self._lent = self._lent, []
        for identity, buffers in lent:
            for buffer in buffers:
                self._pool.give_back(identity, buffer)

    def _offer_buffers(self) -> None:
        for index in self._workers:
            identity = self._store.get(f"device/{index}").decode()
            buffers: list[SharedBuffer] = []
            self._lent.append((identity, buffers))
            try:
                for _ in range(_BUFFERS):
                    buffers.append(self._pool.take_buffer(identity))
            except RuntimeError as error:
                refused = BufferOffer(refusal=str(error)[:1000])
                self._store.set(f"offer/{index}", refused.model_dump_json())
                raise
            offer = BufferOffer(handles=[buffer.handle for buffer in buffers])
            self._store.set(f"offer/{index}", offer.model_dump_json())
        for index in self._workers:
            self._store.queue_pop(f"opened/{index}")

    def _wait_until_read(self, count: int) -> None:
        while self._read < count:
            for index in self._workers:
                self._store.queue_pop(f"read/{index}")
            self._read += 1


class BufferReceiver:
    """The side of worker `index`. Implements `transfer_group.TransferGroup`."""

    def __init__(self, store: Any, index: int, piece_bytes: int, device: torch.device) -> None:
        """Meet the sender at `store`, which is the group's own. Raises RuntimeError."""
        self._store = store
        self._index = index
        self._device = device
        self._received = 0
        store.set(f"device/{index}", identify_device(device))
        self._buffers = read_offer(store.get(f"offer/{index}"), piece_bytes, device)
        store.queue_push(f"opened/{index}", "")

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Return what waits for the next piece and fills `tensor` with it.

        These are called in the order in which they were returned."""
        return partial(self._fill, tensor)

    def abort(self) -> None:
        """Give the group up, whatever the sender does."""
        self._buffers = []

    def _fill(self, tensor: Tensor) -> None:
        if not self._buffers:
            raise RuntimeError("the group has been given up")
        self._store.queue_pop(f"filled/{self._index}")
        tensor.copy_(_part_of(self._buffers[self._received % len(self._buffers)], tensor))
        finish_copies(self._device)
        self._received += 1
        self._store.queue_push(f"read/{self._index}", "")


def _part_of(buffer: Tensor, tensor: Tensor) -> Tensor:
    if tensor.numel() > buffer.numel():
        raise RuntimeError(f"a piece of {tensor.numel()} bytes, but buffers of {buffer.numel()}")
    return buffer[: tensor.numel()]
