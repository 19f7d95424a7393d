"""The model that sees: a Qwen3-VL of 0.4 million parameters, and how it scales pictures."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextAttention

from flotilla_environments.tiny_policy.model import Shape, copy_attended_tokens
from flotilla_environments.tiny_policy.tokenizer import (
    END_OF_TEXT,
    IMAGE_PAD,
    TURN_END,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    token_id,
)


@dataclass(frozen=True)
class Tower:
    """Size of the vision tower; `merge` x `merge` patches of `patch` x `patch` pixels make one
    token. Pictures between `min_pixels` and `max_pixels` are not scaled but to whole tokens."""

    hidden: int = 64
    layers: int = 1
    heads: int = 2
    feed_forward: int = 128
    patch: int = 16
    merge: int = 2
    positions: int = 64
    # Divides pixels of -0.5 to 0.5. All of a patch's 1,536 values move its features in a step of
    # AdamW; so small, they do not run away from it at the rates that the text model needs.
    pixel_scale: float = 8.0
    min_pixels: int = 32 * 32
    max_pixels: int = 512 * 512


def build_vision_model(
    shape: Shape, tower: Tower, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> Qwen3VLForConditionalGeneration:
    """Return a float32 model with tied embeddings, drawn from `seed`."""
    torch.manual_seed(seed)
    end, pad = token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)
    model = Qwen3VLForConditionalGeneration(_make_config(shape, tower, tokenizer))
    _spread_weights(model, tower)
    for module in model.modules():
        if isinstance(module, Qwen3VLTextAttention):
            copy_attended_tokens(module.v_proj.weight, module.o_proj.weight)
    model.generation_config = GenerationConfig(
        eos_token_id=[end, pad],
        pad_token_id=pad,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    return model


def embed_by_product(model: Qwen3VLForConditionalGeneration) -> None:
    """Let the model read patches by a matrix product. It is the same sum as its convolution over
    exactly one patch, whose gradient takes a third of a step's time on a CPU."""
    embed = model.model.visual.patch_embed
    embed.forward = lambda patches: nn.functional.linear(
        patches, embed.proj.weight.flatten(1), embed.proj.bias
    )


def _make_config(shape: Shape, tower: Tower, tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    # Of the rotations of a head, for time, height and width.
    side = shape.head_dim // 6
    sections = [shape.head_dim // 2 - 2 * side, side, side]
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.feed_forward,
            "max_position_embeddings": shape.max_positions,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "mrope_section": sections,
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "eos_token_id": token_id(tokenizer, TURN_END),
            "pad_token_id": token_id(tokenizer, END_OF_TEXT),
            "bos_token_id": None,
        },
        vision_config={
            "depth": tower.layers,
            "hidden_size": tower.hidden,
            "num_heads": tower.heads,
            "intermediate_size": tower.feed_forward,
            "patch_size": tower.patch,
            "spatial_merge_size": tower.merge,
            "out_hidden_size": shape.hidden,
            "num_position_embeddings": tower.positions,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token_id(tokenizer, IMAGE_PAD),
        video_token_id=token_id(tokenizer, VIDEO_PAD),
        vision_start_token_id=token_id(tokenizer, VISION_START),
        vision_end_token_id=token_id(tokenizer, VISION_END),
        tie_word_embeddings=True,
        dtype="float32",
    )


@torch.no_grad()
def _spread_weights(model: Qwen3VLForConditionalGeneration, tower: Tower) -> None:
    """Draw the matrices so that they keep the size of what they read.

    The published start, a standard deviation of 0.02, is made for wide models: in this one the
    features of a picture, and the places of its patches, would vanish next to the text."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            adds = any(part in name for part in ("down_proj", "linear_fc2", "attn.proj"))
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * (0.5 if adds else 1.0))
    model.model.visual.patch_embed.proj.weight.mul_(2 * tower.pixel_scale)
    nn.init.normal_(model.model.language_model.embed_tokens.weight, std=0.5)
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.5)


def save_processor(tower: Tower, folder: Path) -> None:
    """Write the files by which transformers and vLLM scale pictures; vLLM asks for videos' too."""
    sizes = {
        "size": {"shortest_edge": tower.min_pixels, "longest_edge": tower.max_pixels},
        "patch_size": tower.patch,
        "temporal_patch_size": 2,
        "merge_size": tower.merge,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [tower.pixel_scale] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    kinds = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, kind in kinds.items():
        (folder / name).write_text(json.dumps(sizes | kind, indent=2) + "\n")
