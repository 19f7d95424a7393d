"""Replacement of all weights of a live model, between two engine steps."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
# vLLM also logs it for modules without own weights, and names none: _refuse_unloaded does.
NOT_LOADED = "%s: Failed to load weights"


class WeightReload:
    """Reload of all of a model's weights in one call, so that no step can see it half loaded.

    Layers are on the meta device meanwhile, and computing with them would end the engine."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model: Any = model
        self._model_config = model_config

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights by `tensors`, by their names in the checkpoint.

        Raises RuntimeError if some are missing, and errors of the tensors or vLLM. Then some layers
        have new weights and some old ones, until all are loaded again."""
        model = self._model
        logging.getLogger(RELOAD_LOGGER).addFilter(_is_not_of_unloaded)
        _forget_packed_experts(model)
        owned = {name: _weights_of(module) for name, module in model.named_modules()}
        initialize_layerwise_reload(model)
        try:
            model.load_weights(tensors)
            _refuse_unloaded(model, owned)
        except BaseException:
            self._put_back()
            raise
        finalize_layerwise_reload(model, self._model_config)
        _repack_tied_heads(model)

    def _put_back(self) -> None:
        """Restore the old weights of incompletely received layers.

        vLLM keeps the received parts of a layer and counts on from there: it would take too few of
        the next weights, and mix them with these."""
        for module in self._model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self._model, self._model_config)


def _is_not_of_unloaded(record: logging.LogRecord) -> bool:
    return record.msg != NOT_LOADED


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack the experts again when their weights have arrived.

    On a CPU vLLM packs them when it creates its kernel; with an existing kernel, reloading leaves
    them unpacked, and the kernel would misread them. No graph has captured the kernel there."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and _on_cpu(module):
            method.moe_kernel = None


def _on_cpu(module: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _weights_of(module: torch.nn.Module) -> Mapping[str, int]:
    """Return the identities of a module's own parameters by name: a tied head has another's."""
    return {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}


def _refuse_unloaded(model: torch.nn.Module, owned: Mapping[str, Mapping[str, int]]) -> None:
    """Raise RuntimeError if a parameter, or a part of it, would keep its old weights, or have none,
    because none have come for it.

    One that only shares weights of others gets them from there."""
    lacking: dict[str, int] = {}
    come: set[int] = set()
    for name, module in model.named_modules():
        info, own = get_layerwise_info(module), owned[name]
        left: set[str] = set()
        if info.can_load():
            parameters, _ = info.restore_metadata
            left = parameters.keys() - _find_whole(module, info.loaded_weights)
        come |= {own[each] for each in own.keys() - left}
        lacking |= {f"{name}.{each}": own[each] for each in sorted(own.keys() & left)}
    kept = [name for name, identity in lacking.items() if identity not in come]
    if kept:
        raise RuntimeError(f"no weights have come for {', '.join(kept)}")


def _find_whole(module: torch.nn.Module, loaded: Iterable[tuple[str, Any]]) -> set[str]:
    """Return the names of a module's parameters for which all parts have come: vLLM merges several
    of a checkpoint's weights into one. `loaded` are the calls of their loaders, by parameter."""
    parts: set[Any] = set()
    if isinstance(module, QKVParallelLinear):
        parts = {"q", "k", "v"}
    elif isinstance(module, MergedColumnParallelLinear):
        parts = set(range(len(module.output_sizes)))
    come: dict[str, set[Any]] = {}
    for name, call in loaded:
        part = call.arguments.get("loaded_shard_id")
        # No part is named for a weight that the checkpoint has merged already.
        found = parts if part is None else part if isinstance(part, tuple) else (part,)
        come.setdefault(name, set()).update(found)
    return {name for name, found in come.items() if found >= parts}


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Update a tied lm_head that keeps its own packed copy.

    On a CPU vLLM packs every linear layer for oneDNN, and layerwise reloading forgets the copy of
    a head that shares its weight with the embedding: logits would stay those of the old weights.
    """
    for module in model.modules():
        head: Any = module
        packed = type(head).__name__ == "ParallelLMHead" and hasattr(head, "cpu_linear")
        if packed and head.weight.numel():
            head.quant_method.process_weights_after_loading(head)
