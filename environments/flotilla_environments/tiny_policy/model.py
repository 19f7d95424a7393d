"""The model: a Qwen3 of 0.2 million parameters, initialised so that attention copies."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from flotilla_environments.tiny_policy.induction import start_induction


@dataclass(frozen=True)
class Shape:
    """Size of the model; every query head has its own key and value head."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    feed_forward: int = 192
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    # Attention begins with `induction.py`, which needs two layers and a `rope_theta` of a million.
    induces: bool = False


def build_model(
    shape: Shape, *, vocab_size: int, eos_token_id: int, pad_token_id: int, seed: int
) -> Qwen3ForCausalLM:
    """Return a float32 model with tied embeddings, drawn from `seed`."""
    if shape.heads * shape.head_dim != shape.hidden:
        raise ValueError("heads * head_dim must equal hidden: the copying start needs a square")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    for module in model.modules():
        if isinstance(module, Qwen3Attention):
            copy_attended_tokens(module.v_proj.weight, module.o_proj.weight)
    if shape.induces:
        start_induction(model, shape.heads, shape.rope_theta)
    model.generation_config = GenerationConfig(
        eos_token_id=[eos_token_id, pad_token_id],
        pad_token_id=pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    return model


@torch.no_grad()
def copy_attended_tokens(value: Tensor, output: Tensor) -> None:
    """Set value to a random orthogonal matrix and output to its transpose, in place.

    output @ value is then the identity: attended tokens reach the residual stream unchanged, so the
    model can copy before attention has learnt where to look. Both are [hidden, hidden].
    """
    orthogonal, _ = torch.linalg.qr(torch.randn(value.shape))
    value.copy_(orthogonal)
    output.copy_(orthogonal.T)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    model.save_pretrained(folder)
