"""Architectures that whole runs are tried with: tiny and random, each with a real tokenizer and a
published chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.rollout.dialects.families import FAMILIES, REAL, SMALL_ONE, Family
from tests.support.model_zoo import SMALL, make_tokenizer, read_template
from tests.support.multimodal_models import make_config

# The largest difference between engine and trainer of a sampled token's logprob, in float32.
TOLERANCE = 1e-4
# vLLM pads vocabularies to this, as do most published models.
_VOCABULARY_MULTIPLE = 64
_SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    # Large enough for logprobs that depend on the attended tokens.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Architecture:
    """One architecture, and how its policy is written to and read.

    `tokenizer` is the kind of `vocabulary`; `families` are those of the page of models that have
    the architecture."""

    name: str
    make_config: Callable[..., PreTrainedConfig]
    template: str
    vocabulary: str
    tokenizer: str
    ends: Sequence[str]
    dialect: Mapping[str, str]
    control_tokens: Sequence[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    bos: str | None = None
    # Turns of random tokens would hardly ever end by themselves.
    end_gain: float = 4.0
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    families: Sequence[str] = ()

    def make_folder(self, folder: Path) -> None:
        """Write the model, its tokenizer and its template, like a published one."""
        tokenizer = self.make_tokenizer()
        ends = [int(str(tokenizer.convert_tokens_to_ids(end))) for end in self.ends]
        torch.manual_seed(0)
        model = self._make_model(len(tokenizer), ends)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if tokenizer.unk_token is None:
            # Published ones say so: transformers' class of a model type may have one by default.
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"unk_token": None}))

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = make_tokenizer(
            self.vocabulary, self.control_tokens, read_template(self.template), self.renamed
        )
        tokenizer.eos_token = self.ends[0]
        if self.bos is not None:
            tokenizer.bos_token = self.bos
        return tokenizer

    def _make_model(self, tokens: int, ends: Sequence[int]) -> PreTrainedModel:
        vocabulary = -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        sizes = {"vocab_size": vocabulary, "eos_token_id": list(ends), **_SIZES, **self.sizes}
        config = self.make_config(**sizes)
        kind = (
            AutoModelForImageTextToText
            if hasattr(config, "vision_config")
            else AutoModelForCausalLM
        )
        model = kind.from_config(config, dtype=torch.float32)
        _vary_norms(model)
        with torch.no_grad():
            model.get_output_embeddings().weight[list(ends)] *= self.end_gain
        return model


@torch.no_grad()
def _vary_norms(model: PreTrainedModel) -> None:
    """Make norms and biases differ."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))


def _of_family(
    name: str,
    make_config: Callable[..., PreTrainedConfig],
    family_name: str,
    bos: str | None = None,
    also: Sequence[str] = (),
    **sizes: Any,
) -> Architecture:
    """Return an architecture with the tokenizer and the dialect of a family; `also` are further
    families that have it."""
    family: Family = next(each for each in FAMILIES if each.name == family_name)
    dialect = {"name": family.dialect}
    if family.parser:
        dialect["parser"] = family.parser
    return Architecture(
        name,
        make_config,
        family.template,
        family.vocabulary,
        family.tokenizer,
        family.ends,
        dialect,
        family.control_tokens,
        family.renamed,
        bos,
        sizes=sizes,
        families=(family_name, *also),
    )


# Published multimodal models, trained on text.
MULTIMODAL = (
    _of_family("Qwen3-VL", partial(make_config, "qwen3_vl"), "Qwen3-VL", head_dim=32),
    # With weights as large as the others' one update makes all attempts alike.
    _of_family(
        "Qwen3.5", partial(make_config, "qwen3_5"), "Qwen3.5", head_dim=32, initializer_range=0.1
    ),
)
ARCHITECTURES = (
    _of_family(
        "Llama",
        LlamaConfig,
        "Llama 3.1, 3.3",
        "<|begin_of_text|>",
        ("Llama 3.2", "Hermes 2 Pro", "Hermes 3"),
    ),
    _of_family("Qwen2", Qwen2Config, "Qwen2.5", also=("QwQ",)),
    _of_family(
        "Qwen3",
        Qwen3Config,
        "Qwen3",
        also=("Qwen3-2507",),
        head_dim=32,
        tie_word_embeddings=True,
    ),
    _of_family(
        "Qwen3-MoE",
        Qwen3MoeConfig,
        "Qwen3-2507",
        also=("Qwen3", "Qwen3-Coder"),
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    ),
    _of_family("Mistral", MistralConfig, "Mistral Nemo", "<s>", head_dim=32, sliding_window=None),
    Architecture(
        "Gemma 3",
        Gemma3TextConfig,
        "trl/gemma3.jinja",
        "gemma3",
        REAL,
        ("<end_of_turn>", "<eos>"),
        {"name": "full"},
        bos="<bos>",
        end_gain=6.0,
        # A layer with a window that prompts are longer than, and one without.
        sizes={
            # Embeddings are scaled up and tied: at 0.2 every attempt repeats its first token.
            "initializer_range": 0.1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Architecture(
        "Phi-3",
        Phi3Config,
        "trl/phi3.jinja",
        SMALL,
        SMALL_ONE,
        ("<|end|>", "<|endoftext|>"),
        {"name": "full"},
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    _of_family("GLM-4", Glm4Config, "GLM-4.5, GLM-4.6", head_dim=32),
    _of_family(
        "Granite",
        GraniteConfig,
        "Granite 4.0, 4.1",
        # Those of Granite 3.3, 2B.
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
    ),
    *MULTIMODAL,
)
# Tried with two tensor-parallel workers, too: one whose projections are fused, and one of experts.
PARALLEL = tuple(each for each in ARCHITECTURES if each.name in ("Phi-3", "Qwen3-MoE"))
