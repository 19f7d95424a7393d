"""Pictures as a rank shows them to a model: from files to pixels, and through the model's tower.

A tower that is split over ranks is no unit of its own: it is gathered with the embeddings, so that
a rank whose packs show no picture waits for none."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla_common.aio.bounded_bytes import BoundedBytes
from flotilla_common.images.made_pictures import noise_picture, plain_picture
from flotilla_common.images.picture import Picture, PlacedPicture, ShownPicture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.placeholders import check_places, expand_pictures
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.spec.spec import VisionConfig
from flotilla_learner.rank.canary import insert_picture, without_tokens
from flotilla_learner.rank.device_transfer import to_device
from flotilla_learner.rank.text_part import find_tower
from flotilla_learner.types import TrainBatch, TrainSequence

# Bytes of pixels that are kept: of 40 screens of 1366 x 768. Each pack needs its own once more.
_KEPT_BYTES = 1 << 30
# Beside a picture's own tokens, those that mark its start and its end.
_MARKS = 2
# At each end of a sequence that is filled with pictures.
_TEXT_TOKENS = 2


class PixelStore:
    """Pixels of a batch's pictures, each computed when it is first shown, or before it in a thread:
    a screen takes 0.1 s."""

    def __init__(self, reader: PixelReader) -> None:
        self.reader = reader
        self._files: Mapping[str, bytes] = {}
        self._kept: BoundedBytes[str, NDArray[np.float32]] = BoundedBytes(_KEPT_BYTES, _size_of)
        self._ahead: dict[str, Future[NDArray[np.float32]]] = {}
        self._worker = ThreadPoolExecutor(1, "pixels")

    @contextmanager
    def holding(self, files: Mapping[str, bytes]) -> Generator[None]:
        """Have files by their hash while the block runs; blocks within add to them."""
        before = self._files
        self._files = {**before, **files}
        try:
            yield
        finally:
            self._files = before
            for sha256 in files.keys() - before.keys():
                self._kept.drop(sha256)
                if (begun := self._ahead.pop(sha256, None)) is not None:
                    begun.cancel()

    def expect(self, places: Iterable[PlacedPicture]) -> None:
        """Begin to compute the pixels of pictures that will be looked for soon."""
        for place in places:
            data = self._files.get(place.sha256)
            begun = place.sha256 in self._kept or place.sha256 in self._ahead
            if data is not None and not begun:
                self._ahead[place.sha256] = self._worker.submit(self._read, place, data)

    def find(self, place: PlacedPicture) -> NDArray[np.float32]:
        """Return the pixels of a picture, [patches, values].

        Raises ValueError if there is no such file, or if the engine saw another grid."""
        found = self._kept.get(place.sha256)
        if found is None:
            found = self._take(place)
            self._kept.keep(place.sha256, found)
        return found

    def _take(self, place: PlacedPicture) -> NDArray[np.float32]:
        if (begun := self._ahead.pop(place.sha256, None)) is not None:
            return begun.result()
        data = self._files.get(place.sha256)
        if data is None:
            raise ValueError(f"picture {place.sha256[:12]}: a sequence shows it, without its bytes")
        return self._read(place, data)

    def _read(self, place: PlacedPicture, data: bytes) -> NDArray[np.float32]:
        read = self.reader.read(data)
        if read.grid != tuple(place.grid):
            raise ValueError(
                f"picture {place.sha256[:12]}: {_describe(read.grid)} patches here, and"
                f" {_describe(place.grid)} where it was shown: learner and rollout need the same"
                " policy.vision, pillow and transformers"
            )
        return read.values


@dataclass(frozen=True, slots=True)
class Vision:
    """How a policy sees pictures."""

    family: VisionFamily
    store: PixelStore
    config: VisionConfig
    # Ids that are never sampled, int64 on the policy's device.
    banned: Tensor

    @contextmanager
    def showing(self, batch: TrainBatch) -> Generator[None]:
        """Have the pictures of a batch while the block runs.

        Raises ValueError for a batch that no engine of this policy has sampled."""
        for sequence in batch.sequences:
            self._check(sequence)
        with self.store.holding(batch.pictures):
            yield

    def _check(self, sequence: TrainSequence) -> None:
        where = f"group {sequence.group_id}, attempt {sequence.attempt_index}"
        try:
            check_places(sequence.token_ids, sequence.pictures, self.family)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if sequence.canary:
            return
        sampled = sequence.token_ids[sequence.policy_mask]
        if (wrong := np.intersect1d(sampled, self.family.banned_ids)).size:
            raise ValueError(
                f"{where}: the policy wrote token {wrong[0]}, which stands for pictures: an engine"
                " without policy.vision has sampled it"
            )

    def make_canary(self, token_ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], ShownPicture]:
        """Return the canary's tokens with a picture among them, and its place."""
        return insert_picture(token_ids, noise_picture(), self.family)

    def read_canary(self) -> NDArray[np.float32]:
        """Return the pixels of the canary's picture, [patches, values]."""
        return self.store.reader.read(noise_picture().data).values

    def pixel_bytes(self, tokens: int) -> int:
        """Return the bytes of the pixels of pictures of so many tokens."""
        family = self.family
        return 4 * tokens * (family.merge * family.patch) ** 2 * 3 * family.temporal_patch

    def fill(
        self, token_ids: NDArray[np.int32], first: int
    ) -> tuple[NDArray[np.int32], list[ShownPicture]]:
        """Return tokens, as many as given, of as large pictures as fit, up to as many as a
        conversation may have, between text; and the pictures' places.

        Their colours are numbered from `first`."""
        ids = without_tokens(token_ids, self.family.banned_ids)
        factor = self.family.patch * self.family.merge
        pictures: list[Picture] = []
        left = len(ids) - 2 * _TEXT_TOKENS
        while len(pictures) < self.config.max_images and left > _MARKS:
            tokens = min(isqrt(self.family.max_pixels) // factor, isqrt(left - _MARKS))
            side = tokens * factor
            count = self.family.count(self.family.grid(side, side)) if side else left
            if count + _MARKS > left:
                break
            pictures.append(plain_picture(side, side, first + len(pictures)))
            left -= count + _MARKS
        runs = np.array(self.family.picture_ids * len(pictures), np.int32)
        kept = ids[: 2 * _TEXT_TOKENS + left]
        whole = np.insert(kept, [_TEXT_TOKENS] * len(runs), runs)
        return expand_pictures(whole, pictures, self.family)

    def encode(
        self, body: Any, shown: Sequence[PlacedPicture], device: torch.device
    ) -> dict[str, Any]:
        """Return the arguments by which a model's body sees these pictures, in their order.

        One that is shown several times is computed once."""
        if not shown:
            return {}
        unique = {place.sha256: place for place in shown}
        pixels = np.concatenate([self.store.find(place) for place in unique.values()])
        grids = torch.tensor([place.grid for place in unique.values()])
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.is_trained):
            found = body.get_image_features(to_device(pixels, device), grids.to(device))
        index = {sha256: at for at, sha256 in enumerate(unique)}
        order = [index[place.sha256] for place in shown]
        found.pooler_output = [found.pooler_output[at] for at in order]
        if (levels := getattr(found, "deepstack_features", None)) is not None:
            found.deepstack_features = [[level[at] for at in order] for level in levels]
        return {"mm_encoder_outputs": {"image": found}}


def load_vision(config: VisionConfig, folder: Path, device: torch.device) -> Vision:
    """Load how the model in a folder reads pictures. Raises ConfigError."""
    family = load_vision_family(folder, config)
    banned = torch.tensor(family.banned_ids, device=device)
    return Vision(family, PixelStore(PixelReader(folder, family)), config, banned)


def freeze_vision(model: Any, config: VisionConfig) -> frozenset[str]:
    """Freeze the tower, or what projects its features, unless it is trained; return the names of
    the parameters that are frozen."""
    tower = find_tower(model)
    inner = set() if tower is None else {id(parameter) for parameter in tower.parameters()}
    frozen: set[str] = set()
    for name, parameter in model.named_parameters():
        part = config.projector if ".merger." in name or ".deepstack_merger_list." in name else None
        if id(parameter) in inner and (part or config.tower) == "frozen":
            parameter.requires_grad_(False)
            frozen.add(name)
    return frozenset(frozen)


def key_pictures(
    token_ids: NDArray[np.int32], pictures: Sequence[PlacedPicture], family: VisionFamily
) -> NDArray[np.uint64]:
    """Return a number for each token, equal only for tokens of equal ids, and of equal pictures
    where they stand for one: a difference begins where the first different picture's run does."""
    keys = token_ids.astype(np.uint64)
    for place in pictures:
        run = slice(place.offset, place.offset + family.count(place.grid))
        keys[run] = np.uint64(int(place.sha256[:16], 16) | 1 << 63)
    return keys


def _size_of(pixels: NDArray[np.float32]) -> int:
    return pixels.nbytes


def _describe(grid: Sequence[int]) -> str:
    return "x".join(str(side) for side in grid)
