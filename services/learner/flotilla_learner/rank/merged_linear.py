"""Linear layers with LoRA adapters that compute like the engines that receive them.

PEFT's own layer adds the adapter's product to the base layer's. An engine receives the sum of both
weights, rounded to its dtype: in bfloat16 most of an update is below a weight's precision, and the
engine would sample another policy than the trainer differentiates. Here both use the merged weight,
as in full fine-tuning. It exists for one product, and costs a few passes over the matrix.

An engine that receives adapters alone (`policy.adapter_rank`) adds their product, and then so does
the trainer.

Import this only where adapters are used: importing PEFT takes seconds."""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn


class MergedLinear(Linear):
    """A frozen linear layer with adapters, of which it uses one or none."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **options: Any) -> None:
        super().__init__(base_layer, adapter_name, **options)
        # None: the base layer alone.
        self.used_adapter: str | None = adapter_name

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the merged weight, in the dtype of the base layer's."""
        base: Any = self.base_layer
        inputs = x.to(base.weight.dtype)
        bias = None if base.bias is None else base.bias.to(inputs.dtype)
        if self.used_adapter is None:
            return nn.functional.linear(inputs, base.weight, bias)
        down, up = self.adapter_matrices(self.used_adapter)
        scale = self.scaling[self.used_adapter]
        with torch.autocast(inputs.device.type, enabled=False):
            product = self._multiply(inputs, base.weight, down, up, scale)
        return product if bias is None else product + bias

    def _multiply(self, x: Tensor, base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        product: Any = _MergedProduct.apply(x, base, down, up, scale)
        return product

    def adapter_matrices(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Return A [rank, in] and B [out, rank]."""
        down, up = (matrices[adapter].weight for matrices in (self.lora_A, self.lora_B))
        assert isinstance(down, nn.Parameter)
        assert isinstance(up, nn.Parameter)
        return down, up


class SeparateLinear(MergedLinear):
    """The same layer for engines that receive only adapters: it adds their product."""

    def _multiply(self, x: Tensor, base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        inner = nn.functional.linear(x, down.to(x.dtype))
        change = nn.functional.linear(inner, scale_up(up, scale, x.dtype))
        return nn.functional.linear(x, base) + change


def scale_up(up: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale * B in `dtype`, as engines that receive adapters compute with it.

    B is first rounded to `dtype`, the form in which it arrives if it is split over ranks."""
    return (up.to(dtype).float() * scale).to(dtype)


def merge_weight(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return base + scale * B A in the dtype of `base`: summed in float32, and rounded once.

    A and B are first rounded to that dtype, as in every computation with adapters. A weight
    that the adapter does not change keeps its bits, including those of -0.0."""
    first, second = (matrix.to(base.dtype).float() for matrix in (down, up))
    with torch.autocast(base.device.type, enabled=False):
        change = (second @ first).mul_(scale)
    return torch.where(change == 0, base, change.add(base)).to(base.dtype)


class _MergedProduct(torch.autograd.Function):
    """x @ merged.T; the gradient passes through the rounding, and never has the matrix's size."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base: Tensor, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, base, down, up)
        ctx.scale = scale
        return nn.functional.linear(x, merge_weight(base, down, up, scale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, base, down, up = ctx.saved_tensors
        slope = grads[0]
        with torch.autocast(slope.device.type, enabled=False):
            to_x = slope @ merge_weight(base, down, up, ctx.scale)
            inputs, slopes = x.flatten(0, -2), slope.flatten(0, -2)
            inner = inputs @ down.to(x.dtype).t()
            to_inner = slopes @ up.to(x.dtype)
            to_down = (to_inner.t() @ inputs).to(down.dtype).mul_(ctx.scale)
            to_up = (slopes.t() @ inner).to(up.dtype).mul_(ctx.scale)
        return to_x, None, to_down, to_up, None
