"""Random weights in the architecture of Qwen3-8B, small, under its run's policy section."""

import tomllib
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_common.spec.spec import PolicyConfig
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from tests.support.repository import ROOT

SPEC = ROOT / "deploy/runs/qwen3-8b.toml"
# Every length of the run is divided by this, so that all ratios stay.
SHRINK = 128
VOCAB = 512


def make_folder(folder: Path) -> Path:
    """Qwen3-8B's config.json with fewer and smaller layers; head size, groups and base stay."""
    tokenizer = train_tokenizer(["find book hotel Rome system user assistant Tools"] * 3, 290)
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(8)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=40_960 // SHRINK,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        # Large enough for logprobs that depend on what is attended to.
        initializer_range=0.1,
        eos_token_id=int(str(tokenizer.convert_tokens_to_ids("<|im_end|>"))),
        bos_token_id=None,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config)
    _vary(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def _vary(model: Qwen3ForCausalLM) -> None:
    """Norms that are not all ones, and weights that bfloat16 holds, as in the published files."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        parameter.copy_(parameter.bfloat16())


def policy_section(folder: Path, dtype: Literal["float32", "bfloat16"]) -> PolicyConfig:
    """`[policy]` of the run on GPUs, for the small model."""
    section: dict[str, Any] = tomllib.loads(SPEC.read_text())["policy"]
    scaling = section["rope_scaling"]
    scaling["original_max_position_embeddings"] //= SHRINK
    length = section["max_model_len"] // SHRINK
    return PolicyConfig.model_validate(
        {**section, "model": str(folder), "dtype": dtype, "max_model_len": length}
    )
