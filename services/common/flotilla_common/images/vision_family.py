"""How a family of models reads pictures: their scaling, and the tokens that stand for them."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flotilla_common.files.json_files import read_json_object
from flotilla_common.images.picture import Grid
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import VisionConfig

# Values of model_type of which engine and trainer read pictures alike.
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
# The processor refuses pictures that are longer than this times their width, or wider.
MOST_ASPECT = 200
# Packages of which the pixels of a picture depend.
_PACKAGES = ("pillow", "transformers")
# Bounds of pixels in the processor's class, for folders that name none.
_BOUNDS = (56 * 56, 28 * 28 * 1280)


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How one model reads pictures.

    A picture is scaled so that its sides are multiples of `patch * merge` pixels and its area lies
    between `min_pixels` and `max_pixels`; `merge` x `merge` patches make one token. In a prompt it
    is `vision_start`, a run of `image_pad`, `vision_end`."""

    model_type: str
    patch: int
    merge: int
    temporal_patch: int
    min_pixels: int
    max_pixels: int
    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int
    # Hexadecimal SHA-256 of all on which the pixels that the model is given depend.
    processor_digest: str

    @property
    def picture_ids(self) -> tuple[int, int, int]:
        """Ids that a chat template writes for a picture."""
        return (self.vision_start, self.image_pad, self.vision_end)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that the policy never samples: the model would look for a picture behind them."""
        return (self.vision_start, self.vision_end, self.image_pad, self.video_pad)

    def grid(self, width: int, height: int) -> Grid:
        """Return the patches of a picture of such a size, in pixels.

        Raises ValueError for one that is too long to be scaled."""
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise ValueError(
                f"{width}x{height} pixels: one side may be at most {MOST_ASPECT} times the other"
            )
        factor = self.patch * self.merge
        high, wide = (round(side / factor) * factor for side in (height, width))
        if high * wide > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            high, wide = (
                max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
            )
        elif high * wide < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return (1, high // self.patch, wide // self.patch)

    def count(self, grid: Grid) -> int:
        """Return the number of tokens that stand for a picture."""
        return math.prod(grid) // self.merge**2


def load_vision_family(folder: Path, vision: VisionConfig) -> VisionFamily:
    """Read how the model in a folder reads pictures, by its config.json and the settings of its
    processor.

    Raises ConfigError for models that read none, or that are not known."""
    settings = _read(folder, "config.json")
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"policy.vision: models of type {str(kind)[:80]!r} are not shown pictures; those of"
            f" {', '.join(FAMILIES)} are: choose such a model, or remove [policy.vision]"
        )
    processor = read_processor(folder)
    tower = settings["vision_config"]
    bounds = _pixel_bounds(processor, vision)
    merge = processor.get("merge_size", tower.get("spatial_merge_size", 2))
    return VisionFamily(
        model_type=str(kind),
        patch=processor.get("patch_size", tower["patch_size"]),
        merge=merge,
        temporal_patch=processor.get("temporal_patch_size", tower.get("temporal_patch_size", 2)),
        min_pixels=bounds[0],
        max_pixels=bounds[1],
        vision_start=settings.get("vision_start_token_id", 151652),
        vision_end=settings.get("vision_end_token_id", 151653),
        image_pad=settings.get("image_token_id", 151655),
        video_pad=settings.get("video_token_id", 151656),
        processor_digest=_digest(processor, bounds),
    )


def read_processor(folder: Path) -> dict[str, Any]:
    """Return the settings of a model's image processor, from where transformers reads them: newer
    folders have them in processor_config.json, others in preprocessor_config.json.

    Raises ConfigError."""
    if (folder / "processor_config.json").exists():
        nested = _read(folder, "processor_config.json").get("image_processor")
        if isinstance(nested, dict):
            return nested
    return _read(folder, "preprocessor_config.json")


def _pixel_bounds(processor: Mapping[str, Any], vision: VisionConfig) -> tuple[int, int]:
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or _BOUNDS[0]
    most = processor.get("max_pixels") or size.get("longest_edge") or _BOUNDS[1]
    least, most = vision.min_pixels or least, vision.max_pixels or most
    if least > most:
        raise ConfigError(
            f"policy.vision: min_pixels is {least} and max_pixels {most}, one of them by"
            " the model's own processor; set both"
        )
    return least, most


def _digest(processor: Mapping[str, Any], bounds: tuple[int, int]) -> str:
    versions = {name: version(name) for name in _PACKAGES}
    known = [processor, bounds, "pil", versions]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_json_object(folder / name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.vision: {folder / name} cannot be read: {error}") from error
