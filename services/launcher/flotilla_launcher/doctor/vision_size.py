"""Size of what reads pictures in a model, from its config.json. Pure but for reading its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.models.activation_memory import DecoderShape
from flotilla_common.spec.spec import VisionConfig

_COLOURS = 3


@dataclass(frozen=True, slots=True)
class VisionSize:
    """Dimensions of a tower and its projector, which is what merges patches into tokens."""

    # Parameters of each.
    tower: int
    projector: int
    shape: DecoderShape
    # Patches of one token, and numbers of a patch's pixels.
    patches_per_token: int
    patch_values: int
    # Numbers that the decoder gets for each token of a picture.
    features: int
    # Tokens of the largest picture that is shown.
    largest: int

    @property
    def parameters(self) -> int:
        return self.tower + self.projector

    def frozen_parameters(self, vision: VisionConfig) -> int:
        """Return how many are not trained."""
        tower = self.tower if vision.tower == "frozen" else 0
        return tower + (self.projector if vision.projector == "frozen" else 0)

    def shown_tokens(self, vision: VisionConfig, tokens: int) -> int:
        """Return the most tokens of pictures in a conversation of `tokens`."""
        return min(tokens, vision.max_images * self.largest)


def read_vision_size(
    folder: Path, config: Mapping[str, Any], hidden: int, vision: VisionConfig
) -> VisionSize:
    """Read the size of what reads pictures in a model of the folder's `config`, whose decoder is
    `hidden` wide. Raises ConfigError for models that are shown none, and KeyError for dimensions
    that the config lacks."""
    family, tower = load_vision_family(folder, vision), config["vision_config"]
    wide, inner, layers = tower["hidden_size"], tower["intermediate_size"], tower["depth"]
    out = tower.get("out_hidden_size") or hidden
    patch_values = _COLOURS * family.temporal_patch * family.patch**2
    merged = wide * family.merge**2
    levels = len(tower.get("deepstack_visual_indexes") or ())
    # Qwen2.5-VL gates its feed-forward layers, and has no table of positions.
    matrices = 3 if config["model_type"] == "qwen2_5_vl" else 2
    block = 4 * wide * (wide + 1) + matrices * (wide * inner) + inner + 3 * wide
    positions = tower.get("num_position_embeddings") or 0
    return VisionSize(
        tower=(patch_values + 1 + positions) * wide + layers * block,
        projector=(1 + levels) * (merged * (merged + 1) + (merged + 1) * out),
        shape=DecoderShape(layers, wide, inner),
        patches_per_token=family.merge**2,
        patch_values=patch_values,
        features=(1 + levels) * hidden,
        largest=max(1, family.max_pixels // (family.patch * family.merge) ** 2),
    )
