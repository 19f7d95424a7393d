"""Models that are built empty, then filled from a checkpoint or from a model's files.

For a split model each rank reads only its own part, so that no rank ever holds the whole."""

import json
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from flotilla_common.models.multimodal_models import name_in_files
from flotilla_learner.rank.parameter_names import base_parameters
from flotilla_learner.rank.sharding import ShardLayout, local_slices, local_tensor
from flotilla_learner.rank.tensor_shards import ShardFolder
from flotilla_learner.rank.text_part import model_class

MODEL = "model"
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def make_empty_model(
    settings: Any, options: Mapping[str, Any], *, pictures: bool = False
) -> PreTrainedModel:
    """Build a model whose parameters take no memory; its buffers are allocated."""
    own = {name: value for name, value in options.items() if name != "revision"}
    with no_init_weights(), _unallocated_parameters():
        model: Any = model_class(settings, pictures=pictures).from_config(settings, **own)
    # Not within the block above, which gives each registered parameter its own tensor.
    model.tie_weights()
    return model


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in a model's files, each once: parameters and persistent buffers."""
    states = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in states}
    return {**dict(model.named_parameters()), **buffers}


def read_saved_model(
    model: PreTrainedModel, checkpoint: Path, layout: ShardLayout | None
) -> PreTrainedModel:
    """Allocate an empty model, and fill it from a checkpoint; with a layout, with this rank's
    part.

    Raises TensorShardError."""
    if layout is not None:
        layout.split_module(model)
    _allocate(model, layout)
    ShardFolder(checkpoint).read_group(MODEL, saved_tensors(model))
    return model


def _allocate(model: Any, layout: ShardLayout | None) -> None:
    home, device = (layout.home, layout.device) if layout else (torch.device("cpu"),) * 2

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=home)
        # Tied parameters come twice. Where they are kept off the device, they stay there.
        return tensor if isinstance(tensor, DTensor) else tensor.to(device)

    model._apply(place)
    if layout is None:
        # Tied tensors were one, and have each been allocated.
        model.tie_weights()


def find_tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model folder; empty if it has no safetensors."""
    if (folder / _INDEX).exists():
        names: Mapping[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    if not (folder / _FILE).exists():
        return {}
    with safe_open(folder / _FILE, "pt") as opened:
        return dict.fromkeys(opened.keys(), folder / _FILE)


def has_all_tensors(model: nn.Module, files: Mapping[str, Path]) -> bool:
    """Return True if the files contain every parameter and persistent buffer.

    If transformers converts while loading, as for the experts of most models, some are missing."""
    return all(name_in_files(name, files) in files for name in saved_tensors(model))


@torch.no_grad()
def read_parts(
    model: Any, files: Mapping[str, Path], layout: ShardLayout, prefix: str = ""
) -> None:
    """Allocate the parameters of a split empty model, and read this rank's part of the files;
    buffers, which no rank splits, are read whole. `prefix` begins their names in the whole model.

    Raises ValueError for a tensor of another shape."""
    _allocate(model, layout)
    buffers = saved_tensors(model).keys() - dict(model.named_parameters()).keys()
    named = {**base_parameters(model), **{name: model.get_buffer(name) for name in buffers}}
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, tensor in named.items():
            own = name_in_files(prefix + name, files)
            path = files[own]
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, "pt"))
            _read_part(tensor, opened[path].get_slice(own), name)


def _read_part(tensor: Tensor, saved: Any, name: str) -> None:
    if list(saved.get_shape()) != list(tensor.shape):
        raise ValueError(
            f"{name} has shape {list(saved.get_shape())}, the model's is {list(tensor.shape)}"
        )
    part: Tensor = local_tensor(tensor.detach())
    # A rank may hold no row of a small tensor.
    if part.numel():
        part.copy_(saved[local_slices(tensor) if isinstance(tensor, DTensor) else ...])


@contextmanager
def _unallocated_parameters() -> Generator[None]:
    """Put parameters on the meta device when they are registered while the block runs."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
