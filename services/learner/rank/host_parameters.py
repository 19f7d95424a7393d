"""Parameters' copies in host memory, which an optimizer works on, and the way there and back.

Memory for copies and gradients is taken once. Of parameters on a GPU its pages are locked, so that
the device itself copies, and one wait is enough for all tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Tensors begin at multiples of so many bytes.
_ALIGNMENT = 64
_LARGEST_BLOCK = 2**30


class HostParameters:
    """Copies of parameters; gradients come to them, and values go back."""

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
        """Give the copies the parameters' gradients."""
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
        """Give the parameters the copies' values.

        Nothing waits: the device computes in the order in which it is asked, and what it still
        reads is changed after the next gradients have come."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name], non_blocking=True)


def allocate_like(tensors: Mapping[str, Tensor], *, locked: bool) -> dict[str, Tensor]:
    """Return uninitialised tensors of these shapes and dtypes in host memory.

    They share blocks whose sizes are powers of two: to lock pages torch rounds up to one, and
    would so for each tensor."""
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
