"""The caller's identity and the run epoch, which every call to the learner carries."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from services.common.fingerprint import TokenizerDigests
from services.common.rpc import service_error

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

EPOCH_KEY = "flotilla-run-epoch"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of the caller. `incarnation` is new for every process."""

    worker_id: str
    incarnation: str
    device_count: int
    tokenizer: TokenizerDigests


class RunEpoch:
    """The learner's run epoch as last heard; every call carries it."""

    def __init__(self) -> None:
        self._value: int | None = None

    @property
    def metadata(self) -> Metadata:
        return () if self._value is None else ((EPOCH_KEY, str(self._value)),)

    def adopt_epoch(self, value: int) -> bool:
        """Take a newer epoch; False for one that is not newer: that learner is a ghost."""
        if self._value is not None and value <= self._value:
            return False
        self._value = value
        return True

    async def call_with_epoch(self, send: Callable[[Metadata], Awaitable[T]]) -> T:
        """Return `send(metadata)`, called once more if the learner tells a newer epoch."""
        try:
            return await send(self.metadata)
        except grpc.aio.AioRpcError as error:
            if not self.adopt_from_refusal(error):
                raise
        return await send(self.metadata)

    def adopt_from_refusal(self, error: grpc.aio.AioRpcError) -> bool:
        """Take the epoch out of a STALE_EPOCH refusal; False when there is nothing newer."""
        refused = service_error(error)
        if refused is None or refused.reason != "STALE_EPOCH":
            return False
        told = refused.metadata.get("run_epoch", "")
        return told.lstrip("-").isdecimal() and self.adopt_epoch(int(told))
