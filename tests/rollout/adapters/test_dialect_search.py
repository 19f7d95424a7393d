"""What plays a model is found by trying everything, and told in words for the spec."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from transformers import Qwen3Config

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_rollout.adapters.dialect_search import Found, describe_settings, find_settings
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from tests.rollout.dialects.template_corpus import tokenizer_of
from tests.rollout.dialects.templates import (
    NATIVE_CALLS,
    PAD,
    STRANGE_CALLS,
    calls_in,
    chatml,
    seeing,
    tokenizer_that_sees,
    tokenizer_with,
)

SPEC = """
name = "x"
[policy]
model = "{model}"
max_model_len = 64
[rollout]
max_input_length = 8
max_generate_length = 8
"""


def find(tokenizer: TransformersTokenizer, **keys: str) -> Found:
    """Search without vLLM."""
    return find_settings("", tokenizer, DialectConfig.model_validate(keys), vllm=False)


def test_a_template_is_played_by_the_reader_of_its_calls_and_in_full() -> None:
    found = find(tokenizer_with(calls_in(NATIVE_CALLS)), parser="mistral")
    assert found.passed == [{"name": "template"}, {"name": "full"}]
    bare = find(tokenizer_with(chatml("")))
    assert bare.passed == [{"name": "full"}]


def test_what_shows_no_pictures_does_not_play_a_model_that_sees() -> None:
    def find_seeing(template: str) -> Found:
        made = tokenizer_that_sees(template)
        return find_settings("", made, DialectConfig(), vllm=False, pad=PAD)

    assert find_seeing(seeing()).passed == [{"name": "template"}, {"name": "full"}]
    assert find_seeing(seeing("tool")).passed == [{"name": "template"}, {"name": "full"}]
    assert find_seeing(seeing("tool", "user")).passed == []


def test_the_other_keys_of_the_spec_stay() -> None:
    """A template takes any variable, and no renderer takes this one."""
    config = DialectConfig(name="gpt-oss", options={"a": 1})
    found = find_settings("", tokenizer_of("trl/qwen3.jinja"), config, vllm=False)
    assert found.passed == [{"name": "template"}, {"name": "full"}]


def test_every_reader_is_tried_on_the_models_own_template() -> None:
    found = find(tokenizer_of("llama-cpp/StepFun3.5-Flash.jinja"))
    assert found.passed == [
        {"name": "template", "parser": "qwen3_coder"},
        {"name": "template", "parser": "qwen3_xml"},
        {"name": "full"},
    ]
    assert found.other_prompt == []


def test_a_renderer_with_another_prompt_is_named_where_nothing_else_reads_the_calls() -> None:
    found = find(tokenizer_of("llama-cpp/openai-gpt-oss-120b.jinja"))
    assert {"name": "gpt-oss", "own_prompt": True} in found.other_prompt
    assert "another prompt" in describe_settings(found)


def test_the_settings_are_written_as_in_a_spec() -> None:
    passed = [{"name": "template", "parser": "mistral", "reasoning": "mistral"}, {"name": "full"}]
    text = describe_settings(Found(passed, [], 84, True))
    head, _, rest = text.partition("\n")
    table, _, others = rest.partition("\nand so does: ")
    assert head == "this plays it (of 84 readers, parsers and renderers):"
    assert tomllib.loads(table) == {"rollout": {"dialect": passed[0]}}
    assert others == 'name = "full"'


def test_what_was_not_tried_and_that_nothing_plays_is_told() -> None:
    text = describe_settings(find(tokenizer_with(chatml("{{- 1 // 0 }}"))))
    assert text.startswith("none of 40 readers, parsers and renderers plays it; vLLM's")
    assert "vLLM's parsers were not tried: vLLM is not installed here" in text
    assert "rollout.dialect.chat_template" in text
    alone = describe_settings(Found([{"name": "full"}], [], 84, True))
    assert alone.startswith("this plays it, without native calls (of 84")
    assert "not tried" not in alone


@pytest.mark.slow
def test_the_check_of_a_spec_names_the_parser_of_vllm_that_plays_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    fast = tokenizer_of("llama-cpp/GigaChat3-10B-A1.8B.jinja").fast
    fast.save_pretrained(model)
    Qwen3Config(vocab_size=len(fast)).save_pretrained(model)
    (tmp_path / "run.toml").write_text(SPEC.format(model=model))
    words = ("flotilla_rollout", "--config", str(tmp_path / "run.toml"), "--check-config")
    checked = subprocess.run(
        python_command("-m", *words),
        capture_output=True,
        text=True,
        env=child_environment(ours=True),
        check=False,
    )
    assert checked.returncode != 0
    said = checked.stdout + checked.stderr
    assert "a call that the chat template writes is not read again" in said
    assert '[rollout.dialect]\nname = "template"\nparser = "gigachat3"\n' in said
    assert "every other one is tried" in said and "trying dialects" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_strange_form_is_read_by_none_of_vllms_parsers_either() -> None:
    tokenizer = tokenizer_with(calls_in(STRANGE_CALLS))
    found = find_settings("", tokenizer, DialectConfig(), vllm=True)
    assert found.passed == [{"name": "full"}] and found.tried > 80
