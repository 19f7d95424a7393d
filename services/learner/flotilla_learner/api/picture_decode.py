"""Decoding and checking of the pictures of one submission: their bytes, and their places in its
sequences."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.domain.trajectory import Media, is_picture
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.images.picture_files import MOST_BYTES, PictureRefused, read_size
from flotilla_common.images.placeholders import check_places
from flotilla_common.images.vision_family import VisionFamily
from flotilla_learner.api.sequence_decode import MalformedRequestError

# Bytes of all pictures that one trajectory sends.
MOST_PICTURES_BYTES = 256 * 2**20


@dataclass(slots=True)
class _Incoming:
    """One announced picture, and what has come of it."""

    sha256: bytes
    size: int
    pieces: list[bytes] = field(default_factory=list[bytes])
    received: int = 0
    # Kept up as pieces come: hashing a whole picture at once would hold up other calls.
    digest: Any = field(default_factory=hashlib.sha256)


class PictureIntake:
    """Pictures of one submission as they come. Raises MalformedRequestError."""

    def __init__(
        self, header: trajectory_pb2.TrajectoryHeader, family: VisionFamily | None
    ) -> None:
        """Check what a header announces; without a family, no picture is taken."""
        shown = [
            item.sha256
            for sequence in header.sequences
            for item in sequence.media
            if is_picture(item.mime)
        ]
        if family is None and (shown or header.pictures):
            raise MalformedRequestError("has pictures, but the run has no [policy.vision]")
        self._incoming = [_Incoming(each.sha256, each.size_bytes) for each in header.pictures]
        _check_announced(self._incoming, set(shown))
        self.announced_bytes = sum(each.size for each in self._incoming)
        # By hexadecimal SHA-256: files that are whole, and their sizes in pixels.
        self.files: dict[str, bytes] = {}
        self.sizes: dict[str, tuple[int, int]] = {}

    def add_chunk(self, chunk: trajectory_pb2.PictureChunk) -> None:
        """Take the next piece of a picture; check the picture once it is whole."""
        number, data = chunk.picture_index, chunk.data
        if number >= len(self._incoming):
            raise MalformedRequestError(f"chunk of picture {number}, which has no header")
        picture = self._incoming[number]
        picture.received += len(data)
        if not data or picture.received > picture.size:
            raise MalformedRequestError(
                f"pictures[{number}]: a chunk of {len(data)} bytes; {picture.size} bytes of the"
                f" picture were announced, and {picture.received - len(data)} have come"
            )
        picture.pieces.append(data)
        picture.digest.update(data)
        if picture.received == picture.size:
            self._finish_picture(number, picture)

    def check_whole(self) -> None:
        """Refuse a stream that ended before all pictures had come."""
        for number, each in enumerate(self._incoming):
            if each.received < each.size:
                raise MalformedRequestError(
                    f"pictures[{number}]: {each.received} of {each.size} bytes have come"
                )

    def _finish_picture(self, number: int, picture: _Incoming) -> None:
        if picture.digest.digest() != picture.sha256:
            raise MalformedRequestError(f"pictures[{number}] does not match its sha256")
        data, name = b"".join(picture.pieces), picture.sha256.hex()
        picture.pieces.clear()
        try:
            self.sizes[name] = read_size(data)
        except PictureRefused as error:
            raise MalformedRequestError(f"pictures[{number}]: {error}") from None
        self.files[name] = data


def _check_announced(incoming: Sequence[_Incoming], shown: set[bytes]) -> None:
    total = 0
    seen: set[bytes] = set()
    for number, each in enumerate(incoming):
        if not 0 < each.size <= MOST_BYTES:
            raise MalformedRequestError(
                f"pictures[{number}] has {each.size} bytes; 1 to {MOST_BYTES} are allowed"
            )
        if each.sha256 not in shown or each.sha256 in seen:
            why = "is sent twice" if each.sha256 in seen else "is shown by no sequence"
            raise MalformedRequestError(f"pictures[{number}] {why}")
        seen.add(each.sha256)
        total += each.size
    if total > MOST_PICTURES_BYTES:
        raise MalformedRequestError(
            f"{total} bytes of pictures; at most {MOST_PICTURES_BYTES} are taken"
        )


def check_pictures(
    sequence: Sampled,
    family: VisionFamily,
    sizes: Mapping[str, tuple[int, int]],
    where: str,
) -> None:
    """Check that a sequence's image tokens are those of its pictures, and that the policy wrote
    none of them. `sizes` are those of the pictures that came with it, in pixels.

    Raises MalformedRequestError."""
    ids, pictures = sequence.token_ids, sequence.pictures
    for item in pictures:
        if fault := _find_fault(item, family, sizes.get(item.sha256)):
            raise MalformedRequestError(f"{where}: picture {item.sha256[:12]}: {fault}")
    offsets = [item.token_offset for item in pictures]
    if offsets != sorted(offsets):
        raise MalformedRequestError(f"{where}: its pictures are not in the order of their tokens")
    try:
        check_places(ids, [item.place for item in pictures], family)
    except ValueError as error:
        raise MalformedRequestError(f"{where}: {error}") from None
    written = np.isin(ids, family.banned_ids) & policy_mask(sequence.spans)
    if written.any() or (ids == family.video_pad).any():
        raise MalformedRequestError(
            f"{where}: a token stands for a picture or a video, but no picture is there; engines"
            " never sample such a token"
        )


def _find_fault(item: Media, family: VisionFamily, size: tuple[int, int] | None) -> str:
    """Return what contradicts the contract in the description of a picture; "" if nothing does."""
    if item.content:
        return "its bytes are among the media; they come in PictureChunks"
    if item.processor_digest != family.processor_digest:
        return (
            f"it was shown by processor {item.processor_digest[:12] or '(none)'}, but the learner"
            f" has {family.processor_digest[:12]}: install the same transformers and Pillow on both"
            " sides, with the same model files"
        )
    if len(item.grid) != 3 or min(item.grid) < 1:
        return f"its grid is {list(item.grid)}, not patches in time, height and width"
    if size is None:
        return ""
    try:
        expected = family.grid(*size)
    except ValueError as error:
        return str(error)
    width, height = size
    return (
        ""
        if item.grid == expected
        else f"its grid is {list(item.grid)}; {width}x{height} pixels give {list(expected)}"
    )
