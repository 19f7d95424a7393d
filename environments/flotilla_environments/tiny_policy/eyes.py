"""What the model of a folder sees: the places of pictures in an episode, and their pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.placeholders import count_tokens, expand_pictures
from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.spec.spec import VisionConfig
from flotilla_environments.tiny_policy.train import Example


class Eyes:
    """The pictures of a model in a folder, which holds its config and its processor's."""

    def __init__(self, folder: Path) -> None:
        vision = VisionConfig()
        self._family = load_vision_family(folder, vision)
        # The last screen of an episode is always the same.
        self._read = lru_cache(64)(PixelReader(folder, self._family).read)

    def expand(self, example: Example) -> Example:
        """Return an episode with one token for a picture as the model computes it."""
        ids, shown = expand_pictures(example.ids, example.pictures, self._family)
        counts = count_tokens(example.ids, [each.place.grid for each in shown], self._family)
        return replace(example, ids=ids.tolist(), policy=np.repeat(example.policy, counts).tolist())

    def look(self, batch: Sequence[Example], ids: Tensor) -> Mapping[str, Tensor]:
        """Return the pixels of a batch, and which of its ids [batch, tokens] stand for them."""
        read = [self._read(picture.data) for each in batch for picture in each.pictures]
        return {
            "pixel_values": torch.from_numpy(np.concatenate([pixels.values for pixels in read])),
            "image_grid_thw": torch.tensor([pixels.grid for pixels in read]),
            "mm_token_type_ids": (ids == self._family.image_pad).int(),
        }
