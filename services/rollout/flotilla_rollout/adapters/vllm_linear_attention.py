"""Linear attention (gated delta rule) in float32 on CPUs, for which vLLM has kernels in bfloat16
only. vLLM's workers import this module."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import (
    LayerNameType,
    _resolve_layer_name,  # pyright: ignore[reportPrivateUsage]
    vllm_lib,
)

_OPERATOR = "cpu_gdn_attention_core"


def extend_linear_attention() -> None:
    """Make vLLM's operator compute float32 too, from the next step on; may be called again."""
    gdn_attention.register_cpu_gdn_attention_ops()
    vllm_lib.impl(_OPERATOR, _attend, dispatch_key="CPU", allow_override=True)


def _attend(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
) -> None:
    """Compute a step of a layer, like the operator that this one replaces."""
    if mixed_qkv.dtype != torch.float32:
        gdn_attention.cpu_gdn_attention_core(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    context: Any = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        # A step without requests, as at the start.
        return
    step = context.attn_metadata[layer.prefix]
    slots, begun = step.non_spec_state_indices_tensor, step.has_initial_state
    starts = step.non_spec_query_start_loc.tolist()
    sequences = step.num_decodes + step.num_prefills
    # All that go on by one token together, then each prompt.
    parts = [(0, step.num_decodes)] if step.num_decodes else []
    parts += [(each, each + 1) for each in range(step.num_decodes, sequences)]
    for first, end in parts:
        rows = slice(starts[first], starts[end])
        gated = (each[rows].unflatten(0, (end - first, -1)) for each in (mixed_qkv, a, b))
        known = None if begun is None else begun[first:end]
        core_attn_out[rows] = _advance(layer, slots[first:end], known, *gated).flatten(0, 1)


def _advance(
    layer: Any, slots: Tensor, known: Tensor | None, mixed: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """Advance the sequences in `slots` by their new tokens, [sequences, tokens, width]; return
    what these attend to, [sequences, tokens, heads, width].

    `known` says which of them have a state; the default is all."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

    history, memory = _find_states(layer)
    before, states = history[slots], memory[slots]
    if known is not None:
        before = before * known[:, None, None]
        states = states * known[:, None, None, None]
    row = torch.cat([before, mixed.transpose(1, 2)], -1)
    history[slots] = row[..., -before.shape[-1] :]
    weight = layer.conv1d.weight.reshape(row.shape[1], 1, -1)
    mixed = nnf.silu(nnf.conv1d(row, weight, layer.conv1d.bias, groups=len(weight)))
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    query, key, value = mixed.transpose(1, 2).split([keys, keys, values], -1)
    query, key = (
        each.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(
            layer.num_v_heads // layer.num_k_heads, 2
        )
        for each in (query, key)
    )
    one = a.shape[1] == 1
    rule = torch_recurrent_gated_delta_rule if one else torch_chunk_gated_delta_rule
    attended, memory[slots] = rule(
        query,
        key,
        value.unflatten(-1, (-1, layer.head_v_dim)),
        g=-layer.A_log.float().exp() * nnf.softplus(a + layer.dt_bias),
        beta=b.sigmoid(),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return attended


def _find_states(layer: Any) -> tuple[Tensor, Tensor]:
    """Return a layer's last inputs, [slots, width, tokens], and its states, [slots, heads, width of
    keys, width of values]."""
    history, memory = layer.kv_cache
    if not is_conv_state_dim_first():
        history = history.transpose(-1, -2)
    return history, memory.view(*memory.shape[:2], layer.head_k_dim, layer.head_v_dim)
