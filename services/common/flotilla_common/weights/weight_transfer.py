"""Transfer of weights into live engines: the messages that the sender and the workers of an engine
exchange through their store.

The workers send requests and the sender answers, so an engine may skip a publication: a group is
opened once for the workers of one engine, and each publication is requested by its policy. Its
bytes then go to all of them at once, in pieces."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flotilla_common.weights.fingerprint import TensorEntry

# The queue of the store that the sender reads, and the key of its `TransferSettings`.
REQUESTS = "requests"
SETTINGS = "settings"
ACCEPTED = "accepted"
BACKENDS = ("gloo", "nccl", "ipc")

# Start and end of a run of bytes in the publication.
Piece = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Settings of the sender that its receivers adopt."""

    # A side without progress for so long is given up by the other.
    stall_s: float = 15.0
    # Bytes sent at once; an engine holds about twice as many besides its own weights, and over ipc
    # the sender as many again on each of its devices.
    piece_bytes: int = 64 * 2**20

    def to_text(self) -> str:
        """Encode for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> "TransferSettings":
        """Decode what `to_text` encoded."""
        return TransferSettings(**json.loads(text))


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """Request for a group of the sender, which is rank 0, and `workers` workers."""

    group: str
    workers: int
    backend: str


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Request for a publication; the sender writes `ACCEPTED` or a reason to the key `answer`."""

    group: str
    answer: str
    run_epoch: int
    version: int
    fingerprint: str
    pieces: Sequence[Piece]


Request = OpenGroup | SendWeights
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (OpenGroup, SendWeights)}


def encode_request(request: Request) -> str:
    """Encode a request for the store."""
    return json.dumps({"kind": type(request).__name__, **asdict(request)})


def decode_request(text: str | bytes) -> Request:
    """Decode what `encode_request` encoded. Raises ValueError for anything else."""
    try:
        values: dict[str, Any] = json.loads(text)
        return _KINDS[values.pop("kind")](**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a request: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that follow one another in the publication, received into one buffer."""

    start: int
    end: int
    entries: tuple[TensorEntry, ...]
    # The runs of bytes in which it is sent.
    pieces: tuple[Piece, ...]


def plan_buckets(
    entries: Sequence[TensorEntry], total_bytes: int, piece_bytes: int
) -> Iterator[Bucket]:
    """Yield all tensors in buckets of at most `piece_bytes`; a larger tensor has one of its own.

    Buckets are in the order of their bytes, whatever the order of `entries`."""
    entries = sorted(entries, key=lambda entry: entry.offset_bytes)
    ends = [entry.offset_bytes for entry in entries[1:]] + [total_bytes]
    first = 0
    for index, end in enumerate(ends):
        start = entries[first].offset_bytes
        following = ends[index + 1] if index + 1 < len(ends) else None
        if following is None or following - start > piece_bytes:
            pieces = [(at, min(at + piece_bytes, end)) for at in range(start, end, piece_bytes)]
            yield Bucket(start, end, tuple(entries[first : index + 1]), tuple(pieces))
            first = index + 1
