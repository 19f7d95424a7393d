"""The model that engines were given while adapters were trained: base and adapters in one.

Computed as the ranks compute it (`rank/merged_linear.py`): base, A and B in the dtype of the run,
base + scale * B A in float32, rounded once. One tensor is held at a time."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from services.learner.checkpoints.number_formats import (
    SERVED_DTYPES,
    decode_numbers,
    encode_numbers,
    round_numbers,
)
from services.learner.checkpoints.tensor_files import (
    ITEM_BYTES,
    TensorFileError,
    TensorSpan,
    read_header,
)

# The adapters, and PEFT's configuration of them.
ADAPTERS = ("adapter_model.safetensors", "adapter_config.json")
_HEAD = "lm_head.weight"
_PREFIX = "base_model.model."
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """A tensor in a file."""

    path: Path
    span: TensorSpan

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.span.begin)
            return file.read(self.span.end - self.span.begin)

    def numbers(self, kind: str) -> NDArray[np.float32]:
        """Return its numbers, in its shape, as they are in a format."""
        values = decode_numbers(self.read(), self.span.dtype)
        return round_numbers(values, kind).reshape(self.span.shape)


def write_merged_model(checkpoint: Path, base: Path, target: Path, dtype: str) -> None:
    """Write the weights of a checkpoint of adapters, and of the model in `base` under them.

    Raises ValueError where the files of the model have other names for the layers."""
    kind, adapters = SERVED_DTYPES[dtype], _read_tensors(checkpoint / ADAPTERS[0])
    scale = _read_scale(checkpoint / ADAPTERS[1])
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
        _write_header(write, saved, kind)
        for name, tensor in saved.items():
            layer = name.removesuffix(".weight")
            if layer in layers and name.endswith(".weight"):
                down, up = (adapters[f"{_PREFIX}{layer}.lora_{m}.weight"] for m in "AB")
                write.write(_merge(tensor, down, up, scale, kind))
            else:
                write.write(_converted(tensor, kind))
        write.flush()
        os.fsync(write.fileno())


def _merge(
    base: _SavedTensor, down: _SavedTensor, up: _SavedTensor, scale: float, kind: str
) -> bytes:
    whole = base.numbers(kind)
    change = (up.numbers(kind) @ down.numbers(kind)) * np.float32(scale)
    return encode_numbers(np.where(change == 0, whole, whole + change), kind)


def _converted(tensor: _SavedTensor, kind: str) -> bytes:
    """Return the tensor's bytes in the format; those of no floating-point numbers as they are."""
    data, own = tensor.read(), tensor.span.dtype
    if own == kind or own not in _FLOATS:
        return data
    return encode_numbers(decode_numbers(data, own), kind)


def _write_header(write: BinaryIO, saved: Mapping[str, _SavedTensor], kind: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in saved.items():
        own = tensor.span.dtype
        stored = kind if own in _FLOATS else own
        size = (tensor.span.end - tensor.span.begin) // ITEM_BYTES[own] * ITEM_BYTES[stored]
        shape = list(tensor.span.shape)
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    # Data begins at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    write.write(len(text).to_bytes(8, "little") + text)


def _base_tensors(folder: Path) -> dict[str, _SavedTensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise TensorFileError(f"{folder} has no *.safetensors to merge adapters into")
    return {name: tensor for path in paths for name, tensor in _read_tensors(path).items()}


def _read_tensors(path: Path) -> dict[str, _SavedTensor]:
    return {name: _SavedTensor(path, span) for name, span in read_header(path).items()}


def _read_scale(path: Path) -> float:
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return float(config["lora_alpha"]) / int(config["r"])


def _is_tied(path: Path) -> bool:
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings"))
