"""Small pictures, a family of models that reads them, and submissions that show them."""

import io
import zlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.images.picture import Picture
from flotilla_common.images.picture_files import read_picture
from flotilla_common.images.vision_family import VisionFamily
from tests.support.learner import FakeWorker, Submission

# Its ids are the last of the fake ranks' vocabulary; 8 x 8 pixels make one token.
FAMILY = VisionFamily(
    model_type="qwen2_5_vl",
    patch=4,
    merge=2,
    temporal_patch=2,
    min_pixels=8 * 8,
    max_pixels=32 * 32,
    vision_start=60,
    vision_end=61,
    image_pad=62,
    video_pad=63,
    processor_digest="ab" * 32,
)


def draw_picture(seed: int, width: int = 24, height: int = 16, kind: str = "PNG") -> Picture:
    """Draw noise, of another colour for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return read_picture(file.getvalue())


def showing(
    made: Submission,
    pictures: Sequence[Picture],
    sent: Sequence[Picture] | None = None,
    family: VisionFamily = FAMILY,
) -> Submission:
    """Show pictures in a graded submission: the first in its prompt, the others in its observation.
    By default all of them are sent, each once."""
    (sequence,), (old,) = made.header.sequences, made.token_ids
    ids = np.frombuffer(old, "<i4") % FAMILY.vision_start
    prompt, policy, observation, rest = np.split(ids, np.cumsum(sequence.spans.lengths)[:-1])
    runs = [_run_of(picture, family) for picture in pictures]
    parts = [prompt, *runs[:1], policy, observation, *runs[1:], rest]
    shown = [parts[1], *parts[4:-1]]
    starts = np.cumsum([0, *map(len, parts)])
    offsets = [int(starts[n]) + 1 for n, part in enumerate(parts) if any(part is s for s in shown)]
    sequence.spans.lengths[0] += len(parts[1])
    sequence.spans.lengths[2] += sum(map(len, parts[4:-1]))
    sequence.token_count = int(starts[-1])
    sequence.media.extend(
        _reference(picture, offset, family)
        for picture, offset in zip(pictures, offsets, strict=True)
    )
    files = {each.sha256: each for each in (pictures if sent is None else sent)}
    made.header.pictures.extend(
        trajectory_pb2.Picture(sha256=bytes.fromhex(name), size_bytes=len(each.data))
        for name, each in files.items()
    )
    made.token_ids = [np.concatenate(parts).astype("<i4").tobytes()]
    made.pictures = [each.data for each in files.values()]
    return made


def _run_of(picture: Picture, family: VisionFamily) -> np.ndarray:
    count = family.count(family.grid(picture.width, picture.height))
    return np.array([family.vision_start, *[family.image_pad] * count, family.vision_end])


def _reference(
    picture: Picture, offset: int, family: VisionFamily
) -> trajectory_pb2.MediaReference:
    return trajectory_pb2.MediaReference(
        sha256=bytes.fromhex(picture.sha256),
        mime=picture.mime,
        grid=family.grid(picture.width, picture.height),
        token_offset=offset,
        processor_digest=bytes.fromhex(family.processor_digest),
        size_bytes=len(picture.data),
    )


class SeeingWorker(FakeWorker):
    """Sees a picture that its whole group is shown, and another one in each attempt."""

    def __init__(self, address: str, family: VisionFamily = FAMILY) -> None:
        super().__init__(address)
        self._family = family

    def show(self, lease: pb.Lease, attempt: pb.LeasedAttempt, made: Submission) -> Submission:
        pictures = [first_picture(lease.group_id), draw_picture(attempt.seed, 8, 8)]
        return showing(made, pictures, family=self._family)


def first_picture(group_id: str) -> Picture:
    """Return the picture that a group's prompts show."""
    return draw_picture(zlib.crc32(group_id.encode()))
