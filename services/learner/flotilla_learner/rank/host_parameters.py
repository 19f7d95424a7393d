"""Copies of parameters in host memory, on which an optimizer works, and their transfer.

Memory for copies and gradients is allocated once. For parameters on a GPU its pages are pinned, so
that the device itself copies, and one wait covers all tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Tensors start at multiples of this many bytes.
_ALIGNMENT = 64
_LARGEST_BLOCK = 2**30


class HostParameters:
    """Copies of parameters; gradients are fetched to them, and values returned."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        locked = any(parameter.is_cuda for parameter in parameters.values())
        values, self._gradients = (allocate_like(parameters, locked=locked) for _ in range(2))
        self.masters = {
            name: nn.Parameter(values[name].copy_(parameter.detach()))
            for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def fetch_gradients(self) -> None:
        """Copy the parameters' gradients to the copies."""
        for name, parameter in self._parameters.items():
            own = self._gradients[name]
            gradient = parameter.grad
            self.masters[name].grad = (
                None if gradient is None else own.copy_(gradient, non_blocking=True)
            )
        for device in {parameter.device for parameter in self._parameters.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def return_values(self) -> None:
        """Copy the copies' values to the parameters.

        Does not wait: the device works in order, and what it still reads changes only after the
        next gradients have arrived."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name], non_blocking=True)


def allocate_like(tensors: Mapping[str, Tensor], *, locked: bool) -> dict[str, Tensor]:
    """Return uninitialised tensors of these shapes and dtypes in host memory.

    They share blocks whose sizes are powers of two, because torch rounds pinned memory up to one,
    and would do so for each tensor."""
    sizes = {name: _aligned(tensor.nbytes) for name, tensor in tensors.items()}
    left = sum(sizes.values())
    found: dict[str, Tensor] = {}
    rooms: list[Tensor] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        size, tensor = sizes[name], tensors[name]
        place = next((i for i, room in enumerate(rooms) if len(room) >= size), len(rooms))
        if place == len(rooms):
            wanted = _power_of_two(max(size, min(left, _LARGEST_BLOCK)))
            rooms.append(torch.empty(wanted, dtype=torch.uint8, pin_memory=locked))
        found[name] = rooms[place][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        rooms[place] = rooms[place][size:]
        left -= size
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
