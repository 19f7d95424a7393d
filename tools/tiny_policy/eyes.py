"""What the model of a folder sees: the places of pictures in an episode, and their pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.common.images.pixels import PixelReader
from services.common.images.placeholders import expand_pictures
from services.common.images.vision_family import load_vision_family
from services.common.spec.spec import VisionConfig
from tools.tiny_policy.train import Example


class Eyes:
    """The pictures of a model in a folder, which holds its config and its processor's."""

    def __init__(self, folder: Path) -> None:
        vision = VisionConfig()
        self._family = load_vision_family(folder, vision)
        self._reader = PixelReader(folder, self._family)

    def expand(self, example: Example) -> Example:
        """Return an episode with one token for a picture as the model computes it."""
        ids, shown = expand_pictures(example.ids, example.pictures, self._family)
        counts = np.ones(len(example.ids), np.int64)
        pads = np.flatnonzero(np.array(example.ids) == self._family.image_pad)
        counts[pads] = [self._family.count(each.place.grid) for each in shown]
        return replace(example, ids=ids.tolist(), policy=np.repeat(example.policy, counts).tolist())

    def look(self, batch: Sequence[Example], ids: Tensor) -> Mapping[str, Tensor]:
        """Return the pixels of a batch, and which of its ids [batch, tokens] stand for them."""
        read = [self._reader.read(picture.data) for each in batch for picture in each.pictures]
        return {
            "pixel_values": torch.from_numpy(np.concatenate([pixels.values for pixels in read])),
            "image_grid_thw": torch.tensor([pixels.grid for pixels in read]),
            "mm_token_type_ids": (ids == self._family.image_pad).int(),
        }
