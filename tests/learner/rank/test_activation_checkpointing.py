"""Activations that are computed again: how many bytes each choice keeps, and which one is taken."""

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, Qwen3Config

from flotilla_common.models.activation_memory import (
    Checkpointing,
    DecoderShape,
    layer_activation_bytes,
)
from flotilla_learner.rank import attention
from flotilla_learner.rank.activation_checkpointing import (
    choose_checkpointing,
    decoder_shape,
    enable_checkpointing,
)

TOKENS, LAYERS, HIDDEN, INTERMEDIATE = 256, 4, 64, 192
SETTINGS = Qwen3Config(
    vocab_size=64,
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
GPU = 80 * 2**30


def kept_bytes(checkpointing: Checkpointing) -> int:
    """Measure the bytes that live between the forward and the backward pass."""
    attention.register()
    model: Any = AutoModelForCausalLM.from_config(SETTINGS, attn_implementation=attention.NAME)
    model.train()
    enable_checkpointing(model, checkpointing)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        ids = torch.arange(TOKENS)[None] % 64
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        kinds = next(iter(tracker.get_tracker_snapshot("current").values()))
        assert states.requires_grad
    return int(kinds["Total"]) - sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_the_estimate_is_what_the_layers_keep(checkpointing: Checkpointing) -> None:
    shape = DecoderShape(LAYERS, HIDDEN, INTERMEDIATE)
    estimated = layer_activation_bytes(shape, TOKENS, 4, checkpointing)
    # Nothing of the layer that the backward pass recomputes exists yet.
    again = layer_activation_bytes(DecoderShape(1, HIDDEN, INTERMEDIATE), TOKENS, 4, "off")
    kept = estimated - (again if checkpointing != "off" else 0)
    # The final norm and rope's angles come on top, in so small a model.
    assert 0.95 * kept <= kept_bytes(checkpointing) <= 1.15 * kept + 6 * 4 * TOKENS * HIDDEN


@pytest.mark.parametrize(
    ("tokens", "chosen"), [(4096, "off"), (65_536, "selective"), (262_144, "full")]
)
def test_the_least_that_fits_is_taken(tokens: int, chosen: str) -> None:
    settings = Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
    assert decoder_shape(settings) == DecoderShape(28, 1024, 3072)
    found = choose_checkpointing(
        settings, tokens, torch.bfloat16, taken=10 * 2**30, device_bytes=GPU
    )
    assert found == chosen
