"""Parameters split over the ranks (FSDP2): whole ones exist for one block at a time.

A tensor that is not split passes through every function here unchanged, so that callers need no
case distinction. Functions that gather are collective: all ranks call them in the same order."""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flotilla_learner.rank.data_parallel import RankPlacement
from flotilla_learner.rank.text_part import find_tower


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Split of modules over joined ranks."""

    mesh: DeviceMesh
    # Dtype of whole parameters and their products. Parts and gradient sums are float32.
    compute_dtype: torch.dtype
    # Keep parts, with their gradients and moments, in host memory.
    offload: bool = False

    @staticmethod
    def over_ranks(
        place: RankPlacement, device: torch.device, dtype: torch.dtype, *, offload: bool = False
    ) -> "ShardLayout":
        """Return the split over all ranks of each machine; machines hold the same."""
        machines = place.count // place.slots
        if machines == 1:
            mesh = init_device_mesh(device.type, (place.count,))
        else:
            names = ("machine", "slot")
            mesh = init_device_mesh(device.type, (machines, place.slots), mesh_dim_names=names)
        return ShardLayout(mesh, dtype, offload)

    @property
    def device(self) -> torch.device:
        """Device that computes."""
        return torch.device(self.mesh.device_type)

    @property
    def home(self) -> torch.device:
        """Device that holds the parts."""
        return torch.device("cpu") if self.offload else self.device

    def split_module(self, module: Any) -> None:
        """Split a module, one decoder block at a time, and the rest as one unit.

        Gradients become sums over the ranks."""
        for block in decoder_blocks(module):
            self._split_group(block)
        self._split_group(module)
        for part in module.modules():
            if hasattr(part, "set_gradient_divide_factor"):
                # Losses are already normalised over all ranks' tokens.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        # A rank without tokens, or whose tokens skip a parameter, reduces zeros with the others.
        module.set_reduce_scatter_unused_params(True)

    def _split_group(self, module: nn.Module) -> None:
        low = self.compute_dtype != torch.float32
        fully_shard(
            module,
            mesh=self.mesh,
            mp_policy=MixedPrecisionPolicy(self.compute_dtype, torch.float32)
            if low
            else MixedPrecisionPolicy(),
            offload_policy=CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if self.offload
            else OffloadPolicy(),
        )


def add_forward(module: Any, name: str, function: Any) -> Any:
    """Add a method to a split module, which is gathered while it runs, as during `forward`."""
    setattr(module, name, MethodType(function, module))
    register_fsdp_forward_method(module, name)
    return getattr(module, name)


def reshard_unless_grad(*modules: Any) -> None:
    """Free the parameters that a pass without gradients has gathered.

    Otherwise they stay gathered, with their current values, until a backward pass."""
    if not torch.is_grad_enabled():
        for module in modules:
            module.reshard()


def decoder_blocks(model: Any) -> list[nn.Module]:
    """Return the model's decoder blocks, split or not; those of a tower are none."""
    names: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    tower = find_tower(model)
    others = set() if tower is None else {id(module) for module in tower.modules()}

    def is_block(module: nn.Module) -> bool:
        named = any(base.__name__ in names for base in type(module).__mro__)
        return named and id(module) not in others

    return [module for module in model.modules() if is_block(module)]


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank, on the computing device."""
    near: Any = bring_near(tensor)
    return near.full_tensor() if isinstance(tensor, DTensor) else tensor


def bring_near(tensor: Tensor) -> Tensor:
    """Return a split tensor with this rank's part on the computing device."""
    return tensor.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the place of this rank's part in the whole tensor."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def split_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """Split a whole tensor, which every rank has, like `tensor`."""
    if not isinstance(tensor, DTensor) or whole.ndim == 0:
        return whole
    part = torch.empty_like(tensor, dtype=whole.dtype)
    local_tensor(part).copy_(whole[local_slices(tensor)])
    return part


def with_part(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor split like `tensor`, with `part` as this rank's part."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
