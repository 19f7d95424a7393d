"""Receiver of weights that a learner sends into the live engine, over gloo or NCCL.

An engine of vLLM's own weight transfer, registered under `BACKEND`; it is driven by AsyncLLM's
`init_weight_transfer_engine`, `start_`, `update_` and `finish_weight_update`. What it says to the
sender is in `services/common/weight_transfer.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from services.common.fingerprint import TensorEntry
from services.common.network_addresses import split_host_port
from services.common.network_interfaces import choose_interface
from services.common.tensors.tensor_checksum import checksum64
from services.common.tensors.transfer_group import TCPStore, TransferGroup
from services.common.weight_transfer import (
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
from services.rollout.adapters.vllm_reload import DTYPES, WeightReload

BACKEND = "flotilla"
# A sender that is there answers within this.
_CONNECT_S = 10.0


def register_transfer() -> None:
    """Make `BACKEND` known to vLLM; may be called again."""
    # vLLM refuses a name that it knows, and tells nobody which it knows.
    if BACKEND not in WeightTransferEngineFactory._registry:  # pyright: ignore[reportPrivateUsage]
        WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)


@dataclass(kw_only=True)
class GroupInfo(WeightTransferInitInfo):
    """The group to open: where its sender is, and the name that it is to have."""

    address: str
    group: str
    backend: str


@dataclass(kw_only=True)
class WeightsInfo(WeightTransferUpdateInfo):
    """The publication to receive: the policy's name, and the manifest's rows."""

    run_epoch: int
    version: int
    fingerprint: str
    total_bytes: int
    # Name, dtype, shape, offset, checksum.
    rows: Sequence[tuple[str, str, Sequence[int], int, int]]


class TransferRefusedError(RuntimeError):
    """The sender does not send this publication; the weights are as they were."""


class TransferDamagedError(RuntimeError):
    """Bytes that came are not those that the manifest names."""


class WeightReceiver(WeightTransferEngine[GroupInfo, WeightsInfo]):
    """Receiver of all weights at once: nothing changes before the sender has agreed."""

    init_info_cls = GroupInfo
    update_info_cls = WeightsInfo
    supports_draft_weight_update = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # The model is half loaded, and must be loaded whole before it computes again.
        self.torn = False
        self._store: Any = None
        self._group: TransferGroup | None = None
        self._received_on = self.device
        self._name = ""
        self._asked = 0
        self._piece_bytes = 0

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Open a group with the sender; see the base class. Raises RuntimeError."""
        self.shutdown()
        host, port = split_host_port(init_info.address, "the weight sender")
        choose_interface(host)
        connecting = timedelta(seconds=_CONNECT_S)
        self._store = TCPStore(host, port, is_master=False, timeout=connecting)
        settings = TransferSettings.from_text(self._store.get(SETTINGS))
        self._piece_bytes, stall_s = settings.piece_bytes, settings.stall_s
        self._store.set_timeout(timedelta(seconds=stall_s))
        self._name, self._asked = init_info.group, 0
        # gloo knows host memory alone; loading brings it to the device.
        self._received_on = torch.device("cpu") if init_info.backend == "gloo" else self.device
        workers = self.parallel_config.world_size
        if self._is_first:
            opening = OpenGroup(self._name, workers, init_info.backend)
            self._store.queue_push(REQUESTS, encode_request(opening))
        rank = self.parallel_config.rank + 1
        self._group = TransferGroup(
            self._store, host, self._name, rank, workers + 1, init_info.backend, stall_s
        )

    def start_weight_update(self) -> None:
        """Begin nothing: until the sender has agreed the model stays as it is."""

    def receive_weights(self, update_info: WeightsInfo) -> None:
        """Ask for a publication, and load it as it comes; see the base class.

        Raises TransferRefusedError before anything changes; whatever else it raises from then on
        leaves the model torn."""
        if self._group is None:
            raise TransferRefusedError("no group with the sender is open")
        entries = [TensorEntry(n, d, tuple(s), at, c) for n, d, s, at, c in update_info.rows]
        buckets = list(plan_buckets(entries, update_info.total_bytes, self._piece_bytes))
        self._ask_for(update_info, buckets)
        self.torn = True
        tensors = self._receive_tensors(self._group, buckets)
        WeightReload(self.model, self.model_config).load_tensors(tensors)
        if next(tensors, None) is not None:
            raise TransferDamagedError("the model has left tensors unread")
        self.torn = False

    def finish_weight_update(self) -> None:
        """Finish nothing: all of a publication comes by one call."""

    def shutdown(self) -> None:
        """Leave the group; see the base class."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None

    @property
    def _is_first(self) -> bool:
        return self.parallel_config.rank == 0

    def _ask_for(self, info: WeightsInfo, buckets: Sequence[Bucket]) -> None:
        """Have the sender begin. Raises TransferRefusedError."""
        self._asked += 1
        answer = f"{self._name}/answer/{self._asked}"
        if self._is_first:
            pieces = [piece for bucket in buckets for piece in bucket.pieces]
            policy = (info.run_epoch, info.version, info.fingerprint)
            request = SendWeights(self._name, answer, *policy, pieces)
            self._store.queue_push(REQUESTS, encode_request(request))
        try:
            said = self._store.get(answer).decode()
        except RuntimeError as error:
            raise TransferRefusedError(f"the sender does not answer: {error}") from error
        if said != ACCEPTED:
            raise TransferRefusedError(said)

    def _receive_tensors(
        self, group: TransferGroup, buckets: Sequence[Bucket]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor once its bytes have been checked. Raises TransferDamagedError."""
        for bucket in buckets:
            # Never used again: vLLM keeps tensors until all of a layer have come.
            data = torch.empty(
                bucket.end - bucket.start, dtype=torch.uint8, device=self._received_on
            )
            for start, end in bucket.pieces:
                group.broadcast(data[start - bucket.start : end - bucket.start])
            for entry in bucket.entries:
                yield entry.name, _checked_tensor(data, entry, bucket.start)


def _checked_tensor(data: Tensor, entry: TensorEntry, base: int) -> Tensor:
    dtype = DTYPES[entry.dtype]
    length = dtype.itemsize
    for extent in entry.shape:
        length *= extent
    start = entry.offset_bytes - base
    raw = data[start : start + length]
    if checksum64(raw) != entry.checksum:
        raise TransferDamagedError(f"tensor {entry.name} differs from its checksum")
    return raw.view(dtype).view(entry.shape)
