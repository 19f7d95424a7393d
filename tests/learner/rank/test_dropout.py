"""Nothing is drawn at random while a rank trains, in whatever way a model keeps its dropout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    FalconConfig,
    GPT2Config,
    GraniteConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
    XGLMConfig,
)

from flotilla_learner.rank.policy_loading import switch_dropout_off
from tests.support.tiny_ranks import VOCAB, make_batch, make_trainer

HALF = 0.5


def small(make_config: Any, **values: Any) -> PreTrainedConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return make_config(**sizes | values)


STARCODER2 = small(
    Starcoder2Config,
    num_key_value_heads=2,
    residual_dropout=HALF,
    embedding_dropout=HALF,
    attention_dropout=HALF,
)
# Modules of dropout, functions with a share of the module or of its settings, layers that are left
# out, and experts whose input is shaken.
CONFIGS = [
    STARCODER2,
    small(GPT2Config, resid_pdrop=HALF, embd_pdrop=HALF, attn_pdrop=HALF),
    small(GraniteConfig, num_key_value_heads=2, attention_dropout=HALF),
    small(FalconConfig, hidden_dropout=HALF, attention_dropout=HALF),
    small(
        OPTConfig,
        word_embed_proj_dim=32,
        ffn_dim=64,
        pad_token_id=1,
        dropout=HALF,
        attention_dropout=HALF,
        layerdrop=HALF,
    ),
    small(
        BioGptConfig,
        pad_token_id=1,
        hidden_dropout_prob=HALF,
        attention_probs_dropout_prob=HALF,
        activation_dropout=HALF,
        layerdrop=HALF,
    ),
    small(
        XGLMConfig,
        d_model=32,
        ffn_dim=64,
        num_layers=2,
        attention_heads=4,
        pad_token_id=1,
        dropout=HALF,
        activation_dropout=HALF,
        attention_dropout=HALF,
        layerdrop=HALF,
    ),
    small(MixtralConfig, num_key_value_heads=2, router_jitter_noise=HALF),
]


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 35)[None], use_cache=False).logits


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: each.model_type)
def test_a_model_in_training_computes_what_its_engine_does(config: PreTrainedConfig) -> None:
    model = make_model(config)
    served = logits(model.eval())
    model.train()
    assert not torch.equal(logits(model), served), "nothing is drawn in the first place"
    switch_dropout_off(model)
    torch.testing.assert_close(logits(model), served)


def test_a_model_with_dropout_by_functions_is_trained_for_two_steps(tmp_path: Path) -> None:
    make_model(STARCODER2).save_pretrained(tmp_path)
    policy, _, trainer = make_trainer(tmp_path)
    for step in (1, 2):
        result = trainer.train_step(make_batch(policy, step=step), 1e-3)
        # The behaviour's logprobs are the policy's own.
        assert abs(result.metrics["mismatch/is_ratio_max"] - 1.0) < 1e-4
        assert result.metrics["policy/grad_norm"] > 0
