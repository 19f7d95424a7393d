"""Adapters of a live model: added and replaced between two engine steps in each of vLLM's worker
processes, so that running requests continue with the new ones.

vLLM's own loading replaces nothing in place and ignores matrices of layers that it does not know;
publications of a run are verified bytes in one file."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from flotilla_rollout.adapters.vllm_adapter_request import ADAPTER_ID

# Besides the matrices a publication carries the fingerprint of their base, which is not a weight.
_MATRICES = (".lora_A.weight", ".lora_B.weight")


def replace_adapter(runner: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Make the model use these matrices from the next step on; return the layers that do.

    `runner` is vLLM's model runner, and B A is added unscaled. Raises ValueError if there are none,
    and vLLM's error for shapes that do not fit, with some of the layers replaced."""
    # The file is removed after loading, and vLLM may keep its arguments.
    kept = {name: tensor.clone() for name, tensor in tensors if name.endswith(_MATRICES)}
    if not kept:
        raise ValueError("the publication has no adapters, but policy.adapter_rank is set")
    rank = max(matrix.shape[0] for name, matrix in kept.items() if name.endswith(_MATRICES[0]))
    settings = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    adapter = build_adapter(runner, ADAPTER_ID, kept, settings)
    applied = sorted(list_layers(runner) & adapter.loras.keys())
    install_adapter(runner, adapter)
    return applied


def build_adapter(
    runner: Any, adapter_id: int, tensors: Mapping[str, torch.Tensor], settings: PEFTHelper
) -> LoRAModel:
    """Return an adapter of these matrices, by vLLM's names of the layers; nothing uses it yet."""
    manager = runner.lora_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return LoRAModel.from_lora_tensors(
        adapter_id,
        dict(tensors),
        settings,
        device="cpu",
        dtype=runner.lora_manager.lora_config.lora_dtype,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )


def list_layers(runner: Any) -> set[str]:
    """Return the layers that can have an adapter, by vLLM's names."""
    manager = runner.lora_manager._adapter_manager
    return {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}


def install_adapter(runner: Any, adapter: LoRAModel) -> None:
    """Use an adapter from the next step on, in place of an older one with its id.

    Raises vLLM's error for shapes that do not fit."""
    manager = runner.lora_manager._adapter_manager
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)
