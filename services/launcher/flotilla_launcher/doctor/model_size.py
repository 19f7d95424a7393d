"""Size of a model, from its config.json and the headers or the index of its weights. Pure but
for reading those files."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flotilla_common.files.json_files import read_json_object
from flotilla_common.models.expert_models import count_experts
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import VisionConfig
from flotilla_launcher.doctor.vision_size import VisionSize, read_vision_size

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


class UnknownModelSizeError(Exception):
    """Raised when the size cannot be determined; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Dimensions of a decoder; for a vision model those of its language part, except
    `parameters`. `vision` is what reads pictures, if the policy sees any."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    kv_heads: int
    head_dim: int
    # Positions that it was trained for; 0 if the config states none.
    positions: int
    # Heads of queries; 0 where it is not known.
    heads: int = 0
    vision: VisionSize | None = None

    def kv_bytes(self, item_bytes: int) -> int:
        """Return the bytes of one token's keys and values, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * item_bytes


def count_stored(folder: Path) -> int:
    """Count the parameters from the weights' own files; 0 if there are none, or if they hold
    quantized weights, whose sizes tell nothing. Raises UnknownModelSizeError."""
    config = _read_object(folder / CONFIG)
    return 0 if config.get("quantization_config") else _count_in_files(folder, config)


def read_model_size(
    folder: Path, counted: int = 0, vision: VisionConfig | None = None
) -> ModelSize:
    """Read the size of the model in a folder, which has `counted` parameters; 0 if that is not
    known. With `vision` it is read as a model that sees pictures. Raises UnknownModelSizeError."""
    outer = _read_object(folder / CONFIG)
    config = outer.get("text_config") or outer
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        found = ModelSize(
            parameters=0,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config.get("intermediate_size") or 4 * hidden),
            vocab=int(config["vocab_size"]),
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            positions=int(config.get("max_position_embeddings") or 0),
            heads=heads,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownModelSizeError(
            f"{folder / CONFIG} lacks what a decoder has: {error!r}"
        ) from error
    tied = bool(outer.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    if not counted and all(count_experts(outer)):
        raise UnknownModelSizeError(
            f"{folder / CONFIG} describes a mixture of experts, without weights to count: its size"
            " is known where the learner's packages are installed"
        )
    seeing = None if vision is None else _read_vision(folder, outer, hidden, vision)
    estimated = _estimate_parameters(found, tied) + (seeing.parameters if seeing else 0)
    return replace(found, parameters=counted or estimated, vision=seeing)


def _read_vision(
    folder: Path, config: Mapping[str, Any], hidden: int, vision: VisionConfig
) -> VisionSize:
    try:
        return read_vision_size(folder, config, hidden, vision)
    except ConfigError as error:
        raise UnknownModelSizeError(str(error)) from error
    except (KeyError, TypeError) as error:
        raise UnknownModelSizeError(
            f"{folder / CONFIG} lacks what a vision tower has: {error!r}"
        ) from error


def _count_in_files(folder: Path, config: Mapping[str, Any]) -> int:
    index = folder / INDEX
    if index.exists():
        metadata = _read_object(index).get("metadata") or {}
        if metadata.get("total_parameters"):
            return int(metadata["total_parameters"])
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return int(metadata.get("total_size") or 0) // _ITEM_BYTES.get(dtype, 2)
    return sum(_count_in_file(path) for path in sorted(folder.glob("*.safetensors")))


def _count_in_file(path: Path) -> int:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise UnknownModelSizeError(f"{path} is no safetensors file")
            header = json.loads(file.read(length))
        tensors = (value for name, value in header.items() if name != "__metadata__")
        return sum(math.prod(tensor["shape"]) for tensor in tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnknownModelSizeError(f"{path} is no safetensors file: {error!r}") from error


def _estimate_parameters(f: ModelSize, tied: bool) -> int:
    """Estimate the parameters of a dense decoder with gated feed-forward layers, without norms
    and biases."""
    attention = 2 * f.hidden * f.head_dim * (f.heads + f.kv_heads)
    layer = attention + 3 * f.hidden * f.intermediate
    return f.layers * layer + f.vocab * f.hidden * (1 if tied else 2)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise UnknownModelSizeError(str(error)) from error
