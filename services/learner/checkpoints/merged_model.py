"""The merged model that engines served while adapters were trained: base and adapters in one.

Computed as the ranks do (`rank/merged_linear.py`): base, A and B in the dtype of the run,
base + scale * B A in float32, rounded once. One tensor is held at a time."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.learner.checkpoints.number_formats import (
    SERVED_DTYPES,
    decode_numbers,
    encode_numbers,
    round_numbers,
)
from services.learner.checkpoints.tensor_files import TensorFileError, encode_header, read_header
from services.learner.checkpoints.tensor_parts import (
    ADAPTERS,
    SplitTensor,
    TensorPart,
    find_tensors,
)

# PEFT's configuration file of the adapters.
ADAPTER_CONFIG = "adapter_config.json"
_HEAD = "lm_head.weight"
_PREFIX = "base_model.model."
_FLOATS = ("F64", "F32", "F16", "BF16")


def write_merged_model(checkpoint: Path, base: Path, target: Path, dtype: str) -> None:
    """Merge the adapters of a checkpoint into the model in `base`, and write the weights.

    Raises ValueError if the files of the model name its layers differently."""
    kind, adapters = SERVED_DTYPES[dtype], find_tensors(checkpoint, ADAPTERS)
    scale = _read_scale(checkpoint / ADAPTER_CONFIG)
    saved = _base_tensors(base)
    if _is_tied(checkpoint / "config.json"):
        saved.pop(_HEAD, None)
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in adapters}
    if missing := sorted(layers - {name.removesuffix(".weight") for name in saved}):
        raise TensorFileError(
            f"{base} has another name for {missing[0]}, so its adapter cannot be merged here:"
            " export with --adapters, and merge with PEFT"
        )
    with target.open("wb") as write:
        write.write(
            encode_header(
                (name, kind if tensor.dtype in _FLOATS else tensor.dtype, tensor.shape)
                for name, tensor in saved.items()
            )
        )
        for name, tensor in saved.items():
            layer = name.removesuffix(".weight")
            if layer in layers and name.endswith(".weight"):
                down, up = (adapters[f"{_PREFIX}{layer}.lora_{m}.weight"] for m in "AB")
                write.write(_merge(tensor, down, up, scale, kind))
            else:
                write.write(_converted(tensor, kind))
        write.flush()
        os.fsync(write.fileno())


def _merge(base: SplitTensor, down: SplitTensor, up: SplitTensor, scale: float, kind: str) -> bytes:
    whole = _numbers(base, kind)
    change = (_numbers(up, kind) @ _numbers(down, kind)) * np.float32(scale)
    return encode_numbers(np.where(change == 0, whole, whole + change), kind)


def _numbers(tensor: SplitTensor, kind: str) -> NDArray[np.float32]:
    """Return a tensor's numbers, in its shape, as rounded by a format."""
    values = decode_numbers(tensor.read(), tensor.dtype)
    return round_numbers(values, kind).reshape(tensor.shape)


def _converted(tensor: SplitTensor, kind: str) -> bytes:
    """Return the tensor's bytes in the format; unchanged if it is not floating-point."""
    data, own = tensor.read(), tensor.dtype
    if own == kind or own not in _FLOATS:
        return data
    return encode_numbers(decode_numbers(data, own), kind)


def _base_tensors(folder: Path) -> dict[str, SplitTensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise TensorFileError(f"{folder} has no *.safetensors to merge adapters into")
    return {
        name: SplitTensor(span.dtype, span.shape, [TensorPart(path, span, 0)])
        for path in paths
        for name, span in read_header(path).items()
    }


def _read_scale(path: Path) -> float:
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return float(config["lora_alpha"]) / int(config["r"])


def _is_tied(path: Path) -> bool:
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings"))
