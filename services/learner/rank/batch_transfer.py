"""Transfer of a batch from the service to each rank: through memory, or from rank to rank."""

from services.learner.rank.data_parallel import RankPlacement, Replicas
from services.learner.ranks import protocol
from services.learner.types import TrainBatch


def receive_batch(
    message: protocol.Message, place: RankPlacement, replicas: Replicas
) -> TrainBatch:
    """Return the batch of a command, which the service has written into shared memory.

    If ranks are on several machines, the first one reads it and broadcasts it to all others,
    whose messages are empty."""
    if not place.spans_machines:
        return protocol.read_batch(message)
    packed = protocol.pack_batch(message) if replicas.index == 0 else None
    return protocol.unpack_batch(replicas.broadcast_bytes(packed))
