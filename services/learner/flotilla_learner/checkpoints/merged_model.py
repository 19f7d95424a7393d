"""The merged model that engines served while adapters were trained: base and adapters in one.

Computed as the ranks do (`rank/merged_linear.py`): base, A and B in the dtype of the run,
base + scale * B A in float32, rounded once. One tensor is held at a time."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.models.multimodal_models import name_in_files
from flotilla_learner.checkpoints.number_formats import (
    SERVED_DTYPES,
    decode_numbers,
    encode_numbers,
    round_numbers,
)
from flotilla_learner.checkpoints.tensor_files import TensorFileError, encode_header
from flotilla_learner.checkpoints.tensor_parts import (
    ADAPTERS,
    SplitTensor,
    find_model_tensors,
    find_tensors,
)

# PEFT's configuration file of the adapters.
ADAPTER_CONFIG = "adapter_config.json"
_HEAD = "lm_head.weight"
_PREFIX = "base_model.model."
_FLOATS = ("F64", "F32", "F16", "BF16")


def write_merged_model(
    checkpoint: Path, base: Path, target: Path, dtype: str, untouched: Collection[str] = ()
) -> None:
    """Merge the adapters of a checkpoint into the model in `base`, and write the weights; those
    called `untouched` as they are.

    Raises ValueError if the files of the model name its layers differently."""
    kind, adapters = SERVED_DTYPES[dtype], find_tensors(checkpoint, ADAPTERS)
    scale = _read_scale(checkpoint / ADAPTER_CONFIG)
    saved = find_model_tensors(base)
    if _is_tied(checkpoint / "config.json"):
        saved.pop(_HEAD, None)
    layers = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in adapters}
    # By the name of the weight in the files.
    merged = {name_in_files(f"{layer}.weight", saved): layer for layer in layers}
    if missing := sorted(layer for name, layer in merged.items() if name not in saved):
        raise TensorFileError(
            f"{base} has another name for {missing[0]}, so its adapter cannot be merged here:"
            " export with --adapters, and merge with PEFT"
        )
    kinds = {
        name: tensor.dtype if name in untouched or tensor.dtype not in _FLOATS else kind
        for name, tensor in saved.items()
    }
    with target.open("wb") as write:
        write.write(encode_header((name, kinds[name], each.shape) for name, each in saved.items()))
        for name, tensor in saved.items():
            if name in merged:
                down, up = (adapters[f"{_PREFIX}{merged[name]}.lora_{m}.weight"] for m in "AB")
                write.write(_merge(tensor, down, up, scale, kind))
            else:
                write.write(_converted(tensor, kinds[name]))
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
    """Return the tensor's bytes in the format."""
    data, own = tensor.read(), tensor.dtype
    if own == kind:
        return data
    return encode_numbers(decode_numbers(data, own), kind)


def _read_scale(path: Path) -> float:
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return float(config["lora_alpha"]) / int(config["r"])


def _is_tied(path: Path) -> bool:
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings"))
