"""Transfer of weights into live engines: what the sender and the workers of an engine say to each
other at the store where they meet.

The workers ask and the sender answers, so that an engine which skips a publication misses nothing:
a group is opened once for the workers of one engine, and each publication is asked for by its
policy. Its bytes then go to all of them at once, in pieces."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.common.fingerprint import TensorEntry

# The queue of the store that the sender reads, and the key of its `TransferSettings`.
REQUESTS = "requests"
SETTINGS = "settings"
ACCEPTED = "accepted"
BACKENDS = ("gloo", "nccl", "ipc")

# Where a run of bytes starts in the publication, and where it ends.
Piece = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Settings of the sender that its receivers follow."""

    # A side that brings nothing for so long is given up by the other.
    stall_s: float = 15.0
    # Bytes that are sent at once; an engine holds about twice as many beside its own weights, and
    # over ipc the sender as many once more on each of its devices.
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
    """Request for a group of the sender, which is rank 0, and so many workers."""

    group: str
    workers: int
    backend: str


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Request for a publication; the sender writes `ACCEPTED`, or why not, to the key `answer`."""

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
        raise ValueError(f"no request: {error!r}") from error


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
