"""How a batch gets from the service to each rank: through memory, or from rank to rank."""

from typing import Protocol

from services.learner.rank.data_parallel import Place, Replicas
from services.learner.ranks import protocol
from services.learner.types import TrainBatch


class Batches(Protocol):
    """Where a rank has its batches from."""

    def read(self, message: protocol.Message) -> TrainBatch:
        """The batch of a command."""
        ...


class SharedBatches:
    """All ranks are on the service's machine, and read what it wrote into shared memory."""

    def read(self, message: protocol.Message) -> TrainBatch:
        """See `Batches`."""
        return protocol.read_batch(message)


class SentBatches:
    """The first rank reads it there, and sends it to all others; their messages say nothing."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def read(self, message: protocol.Message) -> TrainBatch:
        """See `Batches`."""
        first = self._replicas.index == 0
        packed = self._replicas.spread_bytes(protocol.pack_batch(message) if first else None)
        return protocol.unpack_batch(packed)


def batches_of(place: Place, replicas: Replicas) -> Batches:
    """The way that leads to all ranks of a run."""
    return SentBatches(replicas) if place.far else SharedBatches()
