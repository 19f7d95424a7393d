"""What a rollout worker sees of a model before it starts anything."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from services.common.errors import ConfigError
from services.common.spec import PolicyConfig, SharedConfig
from services.rollout.__main__ import check_dialect
from services.rollout.config.rollout import DialectConfig, RolloutConfig
from tests.rollout.dialects.templates import GEMMA, MISTRAL, chatml, tokenizer_with
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


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (GEMMA, "Conversation roles must alternate"),
        (MISTRAL, "no call is read"),
        (chatml(""), "no call is read"),
        (chatml("{%- if messages | length > 2 %}{{- 1 // 0 }}{%- endif %}"), "division"),
        (chatml("").replace("<|im_end|>", ""), "no call is read"),
        (chatml("{%- if message.role == 'tool' %}{%- continue %}{%- endif %}"), "tool"),
        (chatml("{{- raise_exception('never') }}"), "never"),
    ],
)
def test_a_model_whose_template_breaks_is_refused_before_anything_is_started(
    template: str, words: str, tmp_path: Path
) -> None:
    tokenizer_with(template).fast.save_pretrained(tmp_path)
    Qwen3Config(vocab_size=VOCABULARY, eos_token_id=5).save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path), max_model_len=64)
    config = RolloutConfig(
        max_input_length=8, max_generate_length=8, dialect=DialectConfig(name="template")
    )
    with pytest.raises(ConfigError) as refused:
        check_dialect(SharedConfig(name="x", policy=policy), config)
    assert words in str(refused.value)
