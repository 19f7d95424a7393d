"""Weight updates in each vLLM worker process. vLLM imports this module by name."""

import ctypes
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

# Name, dtype, shape, offset in bytes.
TensorRow = tuple[str, str, Sequence[int], int]

# From linux/prctl.h.
PR_SET_PDEATHSIG = 1

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"

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

    def end_with_parent(self) -> None:
        """Have the kernel end this process when its parent dies, however it dies.

        A killed rollout would otherwise leave an engine that holds its memory and serves nobody.
        """
        if sys.platform != "linux":
            return
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")

    def load_flotilla_weights(self, path: str, total_bytes: int, rows: Sequence[TensorRow]) -> None:
        """Replace the model's weights by those in the file; between two engine steps only.

        All of it happens in one call, so that no step can see a model that is half loaded: layers
        lie on the meta device in between, and computing with those ends the engine.
        """
        worker: Any = self
        model = worker.get_model()
        # It warns at every update of modules that have no weights of their own to load.
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        with set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(_map_tensors(path, total_bytes, rows))
            finalize_layerwise_reload(model, worker.model_config)
            _repack_tied_heads(model)


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
