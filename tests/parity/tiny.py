"""A policy of 700 parameters that every environment makes alike, and sequences for it."""

import math
import random
from typing import Any

VOCABULARY = 19
TEMPERATURE = 0.8
# Of the policy that stands as reference.
REFERENCE = 0.3


def policy(transformers: Any, phase: float = 0.0) -> Any:
    """A Qwen3 in float64, another for each phase. Its parameters are a formula, not drawn."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config).double()
    for number, parameter in enumerate(model.parameters()):
        shape = parameter.shape
        flat = [math.sin(phase + 1.7 * number + 0.9 * place) for place in range(parameter.numel())]
        scale, shift = (0.5, 0.0) if len(shape) > 1 else (0.1, 1.0)
        values = parameter.data.new_tensor(flat).reshape(shape)
        parameter.data.copy_(scale * values + shift)
    return model


def batch() -> dict[str, Any]:
    """Two groups of three: `mask` marks the policy's tokens, `present` all that are no padding.

    `behaviour` is near uniform, which the policy is not: ratios lie on both sides of every clip.
    Advantages are rewards less their group's mean.
    """
    draw = random.Random(11)
    masks = ("11111111", "11001110", "11110000", "00111100", "11100111", "10000000")
    present = ("11111111", "11111110", "11110000", "11111100", "11111111", "10000000")
    return {
        "groups": ["a", "a", "a", "b", "b", "b"],
        "rewards": [1.0, 0.0, 0.5, 0.0, 0.75, 0.0],
        "advantages": [0.5, -0.5, 0.0, -0.25, 0.5, -0.25],
        "prompts": [[draw.randrange(2, VOCABULARY) for _ in range(4)] for _ in masks],
        "completions": [[draw.randrange(2, VOCABULARY) for _ in row] for row in masks],
        "mask": [[int(bit) for bit in row] for row in masks],
        "present": [[int(bit) for bit in row] for row in present],
        "behaviour": [[round(draw.uniform(-3.5, -2.4), 4) for _ in row] for row in masks],
    }
