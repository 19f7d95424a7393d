"""Weight updates in each vLLM worker process. vLLM imports this module by name.

`services/rollout/work/weight_updater.py` decides when they are made."""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from services.common.process_memory import peak_memory_bytes
from services.common.tied_children import end_with_parent
from services.rollout.adapters.vllm_logprobs import correct_sampler
from services.rollout.adapters.vllm_routing import ExpertRecorder

# Name, dtype, shape, offset in bytes.
TensorRow = tuple[str, str, Sequence[int], int]

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
# It says so of every module without weights of its own too, and names none: _refuse_unloaded does.
NOT_LOADED = "%s: Failed to load weights"

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`), hence without state of its own."""

    def end_with_rollout(self, rollout: int, between: Sequence[int]) -> None:
        """End this process when the rollout ends, however it ends; with it the processes `between`.

        A killed rollout would otherwise leave engines that hold their memory and serve nobody.
        """
        if sys.platform != "linux":
            return
        end_with_parent()
        if os.getppid() != rollout:
            # Nothing ends the engine's core, this one's parent, where workers are its children.
            watched = [os.pidfd_open(pid) for pid in (rollout, *between)]
            threading.Thread(target=_end_after, args=watched, daemon=True).start()

    def correct_flotilla_logprobs(self) -> None:
        """Compute logprobs exactly on CPUs, whatever the vocabulary's size."""
        worker: Any = self
        if worker.device.type == "cpu":
            correct_sampler(worker.model_runner.sampler)

    def record_flotilla_experts(self, kept: int) -> None:
        """Record the experts of requests from now on; see `ExpertRecorder`.

        Of workers that share a model all choose the same: the first one records."""
        worker: Any = self
        if worker.rank == 0:
            worker.model_runner.flotilla_experts = ExpertRecorder(worker.model_runner, kept)

    def take_flotilla_experts(self, request_id: str) -> tuple[list[int], int, bytes] | None:
        """Return the experts of a request that has ended; see `ExpertRecorder.take_record`."""
        worker: Any = self
        recorder = getattr(worker.model_runner, "flotilla_experts", None)
        return recorder.take_record(request_id) if recorder is not None else None

    def measure_flotilla_memory(self) -> tuple[int, int, int]:
        """Return the most memory that this process has had, that its device has had in use by
        everybody there, and how large that device is; 0 of a CPU."""
        worker: Any = self
        if worker.device.type != "cuda":
            return peak_memory_bytes(), 0, 0
        free, total = torch.cuda.mem_get_info(worker.device)
        # Memory that torch has reserved and given back is in use by nobody now.
        back = torch.cuda.max_memory_reserved(worker.device) - torch.cuda.memory_reserved(
            worker.device
        )
        return peak_memory_bytes(), total - free + back, total

    def load_flotilla_weights(self, path: str, total_bytes: int, rows: Sequence[TensorRow]) -> None:
        """Replace the model's weights by those in the file; between two engine steps only.

        All of it happens in one call, so that no step can see a model that is half loaded: layers
        lie on the meta device in between, and computing with those ends the engine.
        """
        worker: Any = self
        model = worker.get_model()
        logging.getLogger(RELOAD_LOGGER).addFilter(_is_not_of_unloaded)
        with set_current_vllm_config(worker.vllm_config):
            _forget_packed_experts(model)
            owned = {name: _weights_of(module) for name, module in model.named_modules()}
            initialize_layerwise_reload(model)
            model.load_weights(_map_tensors(path, total_bytes, rows))
            _refuse_unloaded(model, owned)
            finalize_layerwise_reload(model, worker.model_config)
            _repack_tied_heads(model)


def _end_after(rollout: int, *others: int) -> None:
    """Kill processes when another has ended; all are file descriptors."""
    ended = select.poll()
    ended.register(rollout, select.POLLIN)
    ended.poll()
    for other in others:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(other, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _map_tensors(
    path: str, total_bytes: int, rows: Sequence[TensorRow]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views into the mapped file."""
    data = torch.from_file(path, shared=True, size=total_bytes, dtype=torch.uint8)
    for name, dtype_name, shape, offset in rows:
        dtype = DTYPES[dtype_name]
        length = dtype.itemsize
        for extent in shape:
            length *= extent
        yield name, data[offset : offset + length].view(dtype).view(list(shape))


def _is_not_of_unloaded(record: logging.LogRecord) -> bool:
    return record.msg != NOT_LOADED


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Have the experts packed once more when their weights have come.

    On a CPU vLLM packs them for its kernel when it makes the kernel; where it has one, reloading
    leaves them as they came, which the kernel reads as other weights. No graph has captured the
    kernel there."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and _on_cpu(module):
            method.moe_kernel = None


def _on_cpu(module: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _weights_of(module: torch.nn.Module) -> frozenset[int]:
    """Return the identities of a module's own parameters: a tied head has another's."""
    return frozenset(id(parameter) for parameter in module.parameters(recurse=False))


def _refuse_unloaded(model: torch.nn.Module, owned: Mapping[str, frozenset[int]]) -> None:
    """Raise RuntimeError where a module would keep the old weights, since none have come for it.

    A module whose weights are all another's, which have come, has them from there."""
    unloaded: list[str] = []
    come: set[int] = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if info.can_load() and info.load_numel == 0:
            parameters, _ = info.restore_metadata
            unloaded += [name] if parameters else []
        else:
            come |= owned[name]
    kept = [name for name in unloaded if not owned[name] <= come]
    if kept:
        raise RuntimeError(f"no weights have come for {', '.join(kept)}")


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Bring a tied lm_head up to date where it keeps a packed copy of its own.

    On a CPU vLLM packs every linear layer for oneDNN, and layerwise reloading forgets the copy of
    a head that shares its weight with the embedding: logits would stay those of the old weights.
    """
    for module in model.modules():
        head: Any = module
        packed = type(head).__name__ == "ParallelLMHead" and hasattr(head, "cpu_linear")
        if packed and head.weight.numel():
            head.quant_method.process_weights_after_loading(head)
