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


def shard_module(module: Any, device: torch.device, ranks: int) -> None:
    """Split a module over all ranks, a decoder block at a time, the rest as one.

    Gradients become sums over the ranks."""
    mesh = init_device_mesh(device.type, (ranks,))
    for block in _decoder_blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            # Losses are normalised over all ranks' tokens already.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    # A rank without tokens, or whose tokens pass by a parameter, reduces zeros with the others.
    module.set_reduce_scatter_unused_params(True)


def add_forward(module: Any, name: str, function: Any) -> Any:
    """Add a method to a split module, which is whole while it runs as during `forward`."""
    setattr(module, name, MethodType(function, module))
    register_fsdp_forward_method(module, name)
    return getattr(module, name)


def reshard_unless_grad(*modules: Any) -> None:
    """Let go of what a pass without gradients has made whole.

    It would else stay so, and as it is now, until a backward pass."""
    if not torch.is_grad_enabled():
        for module in modules:
            module.reshard()


def _decoder_blocks(model: Any) -> list[nn.Module]:
    names: set[str] = set(getattr(model, "_no_split_modules", None) or ())
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
