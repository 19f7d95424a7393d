"""What a rollout worker sees of a model before it starts anything."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from services.common.errors import ConfigError
from services.common.spec import PolicyConfig, SharedConfig
from services.rollout.__main__ import check_dialect
from services.rollout.config.rollout import RolloutConfig
from tools.tiny_policy.tokenizer import save_tokenizer, train_tokenizer

VOCABULARY = 384


def check_model(folder: Path, *, eos: int) -> str:
    """Check a model whose generation config ends texts by `eos`, too."""
    save_tokenizer(train_tokenizer(["find book hotel"] * 3, 290), folder)
    Qwen3Config(vocab_size=VOCABULARY).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, eos]}))
    policy = PolicyConfig(model=str(folder), max_model_len=64)
    config = RolloutConfig(max_input_length=8, max_generate_length=8)
    return check_dialect(SharedConfig(name="x", policy=policy), config)


def test_ends_of_the_generation_config_are_stops_of_the_run_and_must_be_known(
    tmp_path: Path,
) -> None:
    assert check_model(tmp_path, eos=VOCABULARY - 1) == ""
    with pytest.raises(ConfigError, match=f"turns end by token {VOCABULARY}, and"):
        check_model(tmp_path, eos=VOCABULARY)
