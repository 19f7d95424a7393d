"""Pixels of pictures, as a family's vision tower reads them.

Engine and ranks compute them here, from the same bytes by the same processor: that of Pillow, which
needs no torchvision."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.images.picture import Grid
from flotilla_common.images.picture_files import decode_picture
from flotilla_common.images.vision_family import VisionFamily, read_processor

# What a folder may say of the processor besides the family's own sizes.
_SETTINGS = (
    *("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
    "do_convert_rgb",
)


@dataclass(frozen=True, slots=True)
class Pixels:
    """Patches of one picture, scaled and normalised: float32 [patches, channels * frames * side *
    side], ordered so that patches of one token follow each other."""

    values: NDArray[np.float32]
    grid: Grid


class PixelReader:
    """The image processor of a model; may be used by several threads."""

    def __init__(self, folder: Path, family: VisionFamily) -> None:
        """Build it by the settings in the model's folder. Raises ConfigError."""
        # Importing transformers takes seconds, and most users of this room need no pixels.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        given = read_processor(folder)
        settings: dict[str, Any] = {name: given[name] for name in _SETTINGS if name in given}
        self._processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": family.min_pixels, "longest_edge": family.max_pixels},
            patch_size=family.patch,
            temporal_patch_size=family.temporal_patch,
            merge_size=family.merge,
            **settings,
        )

    def read(self, data: bytes) -> Pixels:
        """Return the pixels of a picture's bytes.

        Takes about 0.1 s for a screen: call it off the event loop. Raises PictureRefused for bytes
        that are no picture, and ValueError for one that cannot be scaled."""
        read = self._processor.preprocess(decode_picture(data), return_tensors="np")
        time, high, wide = read["image_grid_thw"][0].tolist()
        return Pixels(read["pixel_values"], (time, high, wide))
