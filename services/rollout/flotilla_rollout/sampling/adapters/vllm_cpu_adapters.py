"""Adapters on CPUs: vLLM's own product would give requests without one the adapter of another.

vLLM marks tokens without an adapter by the index -1, with which its operators for CPUs (vLLM 0.32,
lora/ops/torch_ops) take the last place's matrices. They also copy the matrices once per token.
vLLM's workers import this module."""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def correct_adapters(manager: Any) -> None:
    """Make vLLM's manager of adapters compute each token's own on a CPU."""
    for wrapper in manager.punica_wrapper_mapping.values():
        wrapper.__class__ = OwnAdapters


class OwnAdapters(PunicaWrapperCPU):
    """Metadata of a batch, and the products for its tokens, by adapter."""

    # Places of adapters in this batch, each with its tokens.
    groups: tuple[tuple[int, Tensor], ...] = ()

    def update_metadata(self, *given: Any, **named: Any) -> None:
        super().update_metadata(*given, **named)
        indices = self.token_lora_indices
        places = [place for place in indices.unique().tolist() if place >= 0]
        self.groups = tuple((place, (indices == place).nonzero()[:, 0]) for place in places)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **unused: Any,
    ) -> None:
        """Add `x A B` of each token's adapter to the slices of `y`; A's product is float32, as in
        vLLM."""
        inputs, outputs = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for place, tokens in self.groups:
            chosen = inputs[tokens].float()
            deltas = [
                (scale * chosen @ a[place, 0].float().T).to(y.dtype) @ b[place, 0].to(y.dtype).T
                for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)
            ]
            outputs[:, : sum(output_slices)].index_add_(0, tokens, torch.cat(deltas, -1))
