"""Transfer of a batch from the service to each rank: through memory, or from rank to rank."""

from typing import Protocol

from services.learner.rank.data_parallel import RankPlacement, Replicas
from services.learner.ranks import protocol
from services.learner.types import TrainBatch


class BatchSource(Protocol):
    """Source of a rank's batches."""

    def read_batch(self, message: protocol.Message) -> TrainBatch:
        """Return the batch of a command."""
        ...


class SharedMemoryBatchSource:
    """Batches that the service writes into shared memory, for ranks on its machine."""

    def read_batch(self, message: protocol.Message) -> TrainBatch:
        """See `BatchSource`."""
        return protocol.read_batch(message)


class BroadcastBatchSource:
    """Batches that the first rank reads from shared memory and broadcasts to all others.

    The messages of the other ranks are empty."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def read_batch(self, message: protocol.Message) -> TrainBatch:
        """See `BatchSource`."""
        first = self._replicas.index == 0
        packed = self._replicas.broadcast_bytes(protocol.pack_batch(message) if first else None)
        return protocol.unpack_batch(packed)


def make_batch_source(place: RankPlacement, replicas: Replicas) -> BatchSource:
    """Return the source that reaches all ranks of a run."""
    return BroadcastBatchSource(replicas) if place.spans_machines else SharedMemoryBatchSource()
