"""The caller's identity and the run epoch, sent with every call to the learner."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from flotilla_common.rpc.rpc import service_error
from flotilla_common.weights.fingerprint import TokenizerDigests

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

EPOCH_KEY = "flotilla-run-epoch"
# Capability of a worker whose policy is shown pictures.
IMAGES = "images"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of the caller. `incarnation` is new for every process, and `capabilities` are of
    those that tasks may need."""

    worker_id: str
    incarnation: str
    device_count: int
    tokenizer: TokenizerDigests
    capabilities: tuple[str, ...] = ()


class RunEpoch:
    """The learner's latest known run epoch, sent with every call."""

    def __init__(self) -> None:
        self._value: int | None = None

    @property
    def metadata(self) -> Metadata:
        return () if self._value is None else ((EPOCH_KEY, str(self._value)),)

    def adopt_epoch(self, value: int) -> bool:
        """Adopt a newer epoch; return False for one that is not newer: that learner is stale."""
        if self._value is not None and value <= self._value:
            return False
        self._value = value
        return True

    async def call_with_epoch(self, send: Callable[[Metadata], Awaitable[T]]) -> T:
        """Return `send(metadata)`, retried once if the learner reports a newer epoch."""
        try:
            return await send(self.metadata)
        except grpc.aio.AioRpcError as error:
            if not self.adopt_from_refusal(error):
                raise
        return await send(self.metadata)

    def adopt_from_refusal(self, error: grpc.aio.AioRpcError) -> bool:
        """Adopt the epoch of a STALE_EPOCH refusal; return False if it is not newer."""
        refused = service_error(error)
        if refused is None or refused.reason != "STALE_EPOCH":
            return False
        epoch = refused.metadata.get("run_epoch", "")
        return epoch.lstrip("-").isdecimal() and self.adopt_epoch(int(epoch))
