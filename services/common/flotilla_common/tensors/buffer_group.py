"""Groups of one sender and the workers of one engine on the sender's own devices: pieces go through
buffers that both sides have mapped.

Each worker has its own buffers, filled in turn, and a connection over which both sides signal that
a buffer has been filled or read."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flotilla_common.tensors.local_meeting import LocalConnection, LocalMeeting, meet
from flotilla_common.tensors.shared_buffers import (
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
    """Sender's side. Implements `transfer_group.TransferGroup`."""

    def __init__(self, store: Any, workers: int, pool: BufferPool, timeout_s: float) -> None:
        """Connect to all workers through `store`, the group's own. Raises RuntimeError."""
        self._peers: list[_Peer] = []
        self._sent = self._read = 0
        try:
            for index in range(workers):
                self._peers.append(_Peer(store, index, pool))
            for peer in self._peers:
                peer.connect(timeout_s)
        except RuntimeError:
            self.abort()
            raise

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Copy a piece into a buffer of each worker, once the buffer has been read.

        Return a callable that waits until all workers have read it."""
        self._wait_until_read(self._sent - _BUFFERS + 1)
        for peer in self._peers:
            peer.fill(self._sent, tensor)
        self._sent += 1
        return partial(self._wait_until_read, self._sent)

    def abort(self) -> None:
        """Abandon the group: its buffers return to the pool."""
        for peer in self._peers:
            peer.leave()
        self._peers = []

    def _wait_until_read(self, count: int) -> None:
        while self._read < count:
            for peer in self._peers:
                peer.wait_until_read()
            self._read += 1


class _Peer:
    """The sender's view of one worker."""

    def __init__(self, store: Any, index: int, pool: BufferPool) -> None:
        """Offer buffers to the worker through `store`. Raises RuntimeError."""
        self._pool = pool
        self._buffers: list[SharedBuffer] = []
        self._connection: LocalConnection | None = None
        self._identity: str = store.get(f"device/{index}").decode()
        self._meeting = LocalMeeting()
        try:
            for _ in range(_BUFFERS):
                self._buffers.append(pool.take_buffer(self._identity))
        except RuntimeError as error:
            refused = BufferOffer(refusal=str(error)[:1000])
            store.set(f"offer/{index}", refused.model_dump_json())
            self.leave()
            raise
        handles = [buffer.handle for buffer in self._buffers]
        offer = BufferOffer(handles=handles, meeting=self._meeting.name)
        store.set(f"offer/{index}", offer.model_dump_json())

    def connect(self, timeout_s: float) -> None:
        """Wait until the worker has opened its buffers. Raises RuntimeError."""
        self._connection = self._meeting.accept(timeout_s)
        self._meeting.close()

    def fill(self, number: int, tensor: Tensor) -> None:
        """Copy piece `number` into its buffer, and signal it. Raises RuntimeError."""
        data = self._buffers[number % _BUFFERS].data
        _part_of(data, tensor).copy_(tensor)
        finish_copies(data.device)
        assert self._connection is not None
        self._connection.tick()

    def wait_until_read(self) -> None:
        """Wait until the worker has read one more piece. Raises RuntimeError."""
        assert self._connection is not None
        self._connection.wait_for_tick()

    def leave(self) -> None:
        """Close the connection and return the buffers to the pool."""
        self._meeting.close()
        if self._connection is not None:
            self._connection.close()
        for buffer in self._buffers:
            self._pool.give_back(self._identity, buffer)


class BufferReceiver:
    """The side of worker `index`. Implements `transfer_group.TransferGroup`."""

    def __init__(
        self, store: Any, index: int, piece_bytes: int, device: torch.device, timeout_s: float
    ) -> None:
        """Connect to the sender through `store`, the group's own. Raises RuntimeError."""
        self._device = device
        self._received = 0
        store.set(f"device/{index}", identify_device(device))
        offer = store.get(f"offer/{index}")
        self._buffers: Sequence[Tensor]
        self._buffers, meeting = read_offer(offer, piece_bytes, device)
        self._connection = meet(meeting, timeout_s)

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Return a callable that waits for the next piece and fills `tensor` with it.

        The callables must be called in the order in which they were returned."""
        return partial(self._fill, tensor)

    def abort(self) -> None:
        """Abandon the group, whatever the sender does."""
        self._connection.close()
        self._buffers = ()

    def _fill(self, tensor: Tensor) -> None:
        self._connection.wait_for_tick()
        tensor.copy_(_part_of(self._buffers[self._received % len(self._buffers)], tensor))
        finish_copies(self._device)
        self._received += 1
        self._connection.tick()


def _part_of(buffer: Tensor, tensor: Tensor) -> Tensor:
    if tensor.numel() > buffer.numel():
        raise RuntimeError(f"a piece of {tensor.numel()} bytes exceeds {buffer.numel()} of buffer")
    return buffer[: tensor.numel()]
