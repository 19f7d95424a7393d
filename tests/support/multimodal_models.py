"""Published multimodal models, tiny and random: a vision tower beside a language model, as their
families save them, with a tokenizer and without any image processor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from tests.support.tiny_model import VOCAB

# The parts of a language model that all kinds have in common.
_TEXT: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
_QWEN_VISION: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_DEEPSTACK: Mapping[str, Any] = {"deepstack_visual_indexes": [0]}
_ROTATED: Mapping[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    }
}
_PARTLY_ROTATED: Mapping[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
_LINEAR: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SIGLIP: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
# The text's and the vision's settings of each kind, by `model_type`.
KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen3_vl": (_ROTATED, {**_QWEN_VISION, **_DEEPSTACK}),
    "qwen3_vl_moe": ({**_ROTATED, **_EXPERTS}, {**_QWEN_VISION, **_DEEPSTACK}),
    "qwen3_5": ({**_PARTLY_ROTATED, **_LINEAR}, _QWEN_VISION),
    "qwen3_5_moe": (
        {
            **_PARTLY_ROTATED,
            **_LINEAR,
            **_EXPERTS,
            "shared_expert_intermediate_size": 48,
        },
        _QWEN_VISION,
    ),
    "gemma3": (
        {
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
        },
        _SIGLIP,
    ),
    "mistral3": ({"model_type": "mistral"}, {**_SIGLIP, "head_dim": 16}),
    "gemma4": (
        {
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "pad_token_id": 0,
        },
        {**_SIGLIP, "head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 16},
    ),
    "internvl": (
        {"model_type": "qwen3"},
        {**_SIGLIP, "image_size": [16] * 2, "patch_size": [4] * 2},
    ),
    "qwen2_vl": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [8, 4, 4],
            },
        },
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
    ),
    "qwen2_5_vl": (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [8, 4, 4],
            },
        },
        {**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 16},
    ),
}


def make_config(kind: str, *, tie_word_embeddings: bool = False, **sizes: Any) -> PreTrainedConfig:
    """Return the configuration of a whole model; `sizes` are of its text part."""
    text, vision = KINDS[kind]
    make: Any = CONFIG_MAPPING[kind]
    tied = {"tie_word_embeddings": tie_word_embeddings}
    inner = {**_TEXT, **sizes, **tied, **text}
    last = inner["vocab_size"]
    return make(
        text_config=inner,
        vision_config=dict(vision),
        **tied,
        image_token_id=last - 4,
        video_token_id=last - 5,
        vision_start_token_id=last - 6,
        vision_end_token_id=last - 7,
    )


def make_multimodal(folder: Path, kind: str, *, tied: bool = False) -> PreTrainedModel:
    """Write the whole model and a tokenizer to `folder`; float32. Return it for evaluation."""
    tokenizer = train_tokenizer(["find book hotel Rome system user assistant Tools"] * 3, 290)
    save_tokenizer(tokenizer, folder)
    end = int(str(tokenizer.convert_tokens_to_ids("<|im_end|>")))
    config = make_config(kind, tie_word_embeddings=tied, eos_token_id=end)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model
