"""Receiver of weights that a learner sends into the live engine, over gloo, NCCL or ipc.

An engine of vLLM's own weight transfer, registered under `BACKEND`; it is driven by AsyncLLM's
`init_weight_transfer_engine`, `start_`, `update_` and `finish_weight_update`."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from flotilla_common.domain.policy import PolicyId
from flotilla_common.tensors.sender_connection import (
    SenderConnection,
    TransferDamagedError,
    TransferRefusedError,
)
from flotilla_common.weights.fingerprint import TensorEntry
from flotilla_common.weights.weight_transfer import OpenGroup
from flotilla_rollout.adapters.vllm_reload import WeightReload

BACKEND = "flotilla"


def register_transfer() -> None:
    """Make `BACKEND` known to vLLM; may be called again."""
    # vLLM refuses a name that it knows, and has no public list of them.
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


class WeightReceiver(WeightTransferEngine[GroupInfo, WeightsInfo]):
    """Receiver of all weights at once: nothing changes before the sender has agreed."""

    init_info_cls = GroupInfo
    update_info_cls = WeightsInfo
    supports_draft_weight_update = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Layers of several policies lie beside each other until all are loaded again.
        self.torn = False
        # Why the last call failed; empty when it did not. Not raised: vLLM reads answers of its
        # workers up to the first failure, and takes the others for those of the next call.
        self.failure = ""
        self._connection: SenderConnection | None = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Open a group with the sender; see the base class. Sets `failure`."""
        self.shutdown()
        parallel = self.parallel_config
        opening = OpenGroup(init_info.group, parallel.world_size, init_info.backend)
        with self._noted_failure():
            self._connection = SenderConnection(
                init_info.address, opening, parallel.rank, self.device
            )

    def start_weight_update(self) -> None:
        """Begin nothing: until the sender has agreed the model stays as it is."""

    def receive_weights(self, update_info: WeightsInfo) -> None:
        """Request a publication, and load it as it comes; see the base class.

        Sets `failure`, and `torn` where it failed after the sender had agreed."""
        with self._noted_failure():
            self._receive(update_info)

    def finish_weight_update(self) -> None:
        """Finish nothing: all of a publication comes by one call."""

    def shutdown(self) -> None:
        """Leave the group; see the base class."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _receive(self, info: WeightsInfo) -> None:
        if self._connection is None:
            raise TransferRefusedError("no group with the sender is open")
        policy = PolicyId(info.run_epoch, info.version, bytes.fromhex(info.fingerprint))
        entries = [TensorEntry(n, d, tuple(s), at, c) for n, d, s, at, c in info.rows]
        tensors = self._connection.request_weights(policy, entries, info.total_bytes)
        self.torn = True
        WeightReload(self.model, self.model_config).load_tensors(tensors)
        if next(tensors, None) is not None:
            raise TransferDamagedError("the model has left tensors unread")
        self.torn = False

    @contextmanager
    def _noted_failure(self) -> Generator[None]:
        self.failure = ""
        try:
            yield
        # Whatever gloo, NCCL, the sender or the model raise is an answer of this worker's.
        except Exception as error:  # noqa: BLE001
            self.failure = str(error) or repr(error)
