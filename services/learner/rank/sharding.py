"""Parameters that are split over the ranks (FSDP2): whole ones exist for a block at a time.

A tensor that is not split passes through every function here unchanged, so that callers need not
ask. Functions that gather are collective: all ranks call them in the same order."""

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_model(model: Any, device: torch.device, ranks: int, body: Any) -> Any:
    """Split a model over all ranks, a decoder block at a time, the rest as one.

    Returns `body`, a function of the model and its arguments, as one of the arguments alone
    during which the blocks that it runs are whole. Gradients become sums over the ranks."""
    mesh = init_device_mesh(device.type, (ranks,))
    for block in _decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # Losses are normalised over all ranks' tokens already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # A rank without tokens, or whose tokens pass by a parameter, reduces zeros with the others.
    model.set_reduce_scatter_unused_params(True)
    model.run_body = MethodType(body, model)
    register_fsdp_forward_method(model, "run_body")
    return model.run_body


def _decoder_blocks(model: Any) -> list[nn.Module]:
    names: set[str] = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_named(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors one after another: only one of them need exist at a time."""
    for name, tensor in tensors.items():
        yield name, gather_tensor(tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """Split a whole tensor, which every rank has, as `tensor` is split."""
    if not isinstance(tensor, DTensor) or whole.ndim == 0:
        return whole
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
