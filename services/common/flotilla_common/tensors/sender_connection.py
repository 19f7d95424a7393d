"""One worker's connection to the weight sender; see `common/weights/weight_transfer.py`."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc.network_addresses import split_host_port
from flotilla_common.tensors.buffer_group import BufferReceiver
from flotilla_common.tensors.host_buffers import host_buffer
from flotilla_common.tensors.tcp_store import PrefixStore, join_tcp_store
from flotilla_common.tensors.tensor_checksum import checksum64
from flotilla_common.tensors.tensor_views import view_tensor
from flotilla_common.tensors.transfer_group import CollectiveGroup, TransferGroup
from flotilla_common.weights.fingerprint import TensorEntry
from flotilla_common.weights.network_interfaces import suggest_network_fix
from flotilla_common.weights.weight_transfer import (
    ACCEPTED,
    REQUESTS,
    SETTINGS,
    Bucket,
    OpenGroup,
    SendWeights,
    TransferSettings,
    encode_request,
    plan_buckets,
)

# A live sender answers within this.
_CONNECT_S = 10.0


class TransferRefusedError(RuntimeError):
    """The sender does not send this publication; no byte of it has arrived."""


class TransferDamagedError(RuntimeError):
    """Received bytes do not match the manifest."""


class SenderConnection:
    """Membership of worker `index` in the group of its engine with the sender at `address`.

    All workers of an engine make the same calls in the same order; the first requests for all."""

    def __init__(self, address: str, opening: OpenGroup, index: int, device: torch.device) -> None:
        """Open the group. Raises RuntimeError, with the fix, if it cannot be formed."""
        host, port = split_host_port(address, "the weight sender")
        self._name, self._first, self._requests = opening.group, index == 0, 0
        # gloo handles host memory only; loading copies it to the device.
        self._device = torch.device("cpu") if opening.backend == "gloo" else device
        try:
            self._store: Any = join_tcp_store(host, port, timedelta(seconds=_CONNECT_S))
            self._settings = TransferSettings.from_text(self._store.get(SETTINGS))
            self._store.set_timeout(timedelta(seconds=self._settings.stall_s))
            if self._first:
                self._store.queue_push(REQUESTS, encode_request(opening))
            self._group = self._join_group(opening, host, index)
        except RuntimeError as error:
            raise RuntimeError(
                f"worker {index} cannot join the weight sender at {address} over {opening.backend}"
                f" ({error}): if it runs, {suggest_network_fix()}"
            ) from error

    def request_weights(
        self, policy: PolicyId, entries: Sequence[TensorEntry], total_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Request a publication; return its tensors by name, each checked when it is taken.

        Raises TransferRefusedError. The iterator raises TransferDamagedError, and RuntimeError
        when the sender is lost."""
        buckets = list(plan_buckets(entries, total_bytes, self._settings.piece_bytes))
        self._requests += 1
        answer = f"{self._name}/answer/{self._requests}"
        if self._first:
            pieces = [piece for bucket in buckets for piece in bucket.pieces]
            fields = (policy.run_epoch, policy.version, policy.fingerprint.hex())
            request = SendWeights(self._name, answer, *fields, pieces)
            self._store.queue_push(REQUESTS, encode_request(request))
        try:
            reply = self._store.get(answer).decode()
        except RuntimeError as error:
            raise TransferRefusedError(f"the sender does not answer: {error}") from error
        if reply != ACCEPTED:
            raise TransferRefusedError(reply)
        return self._receive_tensors(buckets)

    def close(self) -> None:
        """Leave the group, even in the middle of a transfer."""
        self._group.abort()

    def _join_group(self, opening: OpenGroup, host: str, index: int) -> TransferGroup:
        piece_bytes, stall_s = self._settings.piece_bytes, self._settings.stall_s
        if opening.backend == "ipc":
            place = PrefixStore(opening.group, self._store)
            return BufferReceiver(place, index, piece_bytes, self._device, stall_s)
        size = opening.workers + 1
        return CollectiveGroup(
            self._store, host, opening.group, index + 1, size, opening.backend, stall_s
        )

    def _receive_tensors(self, buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of each bucket while the next one arrives."""
        coming = [self._begin_bucket(bucket) for bucket in buckets[:1]]
        for index, bucket in enumerate(buckets):
            data, waits = coming.pop()
            for wait in waits:
                wait()
            coming += [self._begin_bucket(each) for each in buckets[index + 1 : index + 2]]
            for entry in bucket.entries:
                yield entry.name, _checked_tensor(data, entry, bucket.start)

    def _begin_bucket(self, bucket: Bucket) -> tuple[Tensor, list[Callable[[], object]]]:
        # Never reused: the loader keeps tensors until a layer is complete.
        size = bucket.end - bucket.start
        data = (
            host_buffer(size)
            if self._device.type == "cpu"
            else torch.empty(size, dtype=torch.uint8, device=self._device)
        )
        pieces = [data[start - bucket.start : end - bucket.start] for start, end in bucket.pieces]
        return data, [self._group.begin_broadcast(piece) for piece in pieces]


def _checked_tensor(data: Tensor, entry: TensorEntry, base: int) -> Tensor:
    tensor = view_tensor(data, entry.dtype, entry.shape, entry.offset_bytes - base)
    if checksum64(tensor.reshape(-1).view(torch.uint8)) != entry.checksum:
        raise TransferDamagedError(f"tensor {entry.name} differs from its checksum")
    return tensor
