"""A rollout worker's checks of a model before it starts anything."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3Config

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig, SharedConfig, VisionConfig
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from flotilla_rollout.__main__ import check_dialect
from flotilla_rollout.adapters.model_files import ModelFiles, read_model_folder
from flotilla_rollout.config.rollout import DialectConfig, RolloutConfig
from flotilla_rollout.types import PromptFacts, Tool
from tests.rollout.dialects.templates import (
    GEMMA,
    MISTRAL,
    NATIVE_CALLS,
    PAD,
    STRANGE_CALLS,
    calls_in,
    chatml,
    seeing,
    tokenizer_that_sees,
    tokenizer_with,
    vision_ids,
)

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
        (calls_in(STRANGE_CALLS), "is not read again: it writes '<call:look_up>"),
        # Llama's calls, with a reader of other calls.
        (calls_in(NATIVE_CALLS.replace("arguments", "parameters", 1)), 'under "arguments"'),
        # Like Seed-OSS's, which writes Python's literals.
        (calls_in(NATIVE_CALLS.replace(" | tojson", "")), "is not valid JSON"),
        # One that shows only the last turn, so that no turn can be continued token by token.
        (
            chatml(
                "{%- if message.role == 'assistant' and not loop.last %}{%- continue %}{%- endif %}"
            ),
            "rewrites, repeats or leaves out earlier turns",
        ),
        # Like Firefunction's, which knows no tools.
        (calls_in(NATIVE_CALLS) + "{{- functions[0] }}", "'functions' is undefined"),
    ],
)
def test_a_model_whose_template_breaks_is_refused_before_anything_is_started(
    template: str, words: str, tmp_path: Path
) -> None:
    tokenizer_with(template).fast.save_pretrained(tmp_path)
    Qwen3Config(vocab_size=VOCABULARY, eos_token_id=5).save_pretrained(tmp_path)
    policy = PolicyConfig(model=str(tmp_path), max_model_len=64)
    with pytest.raises(ConfigError) as refused:
        read_model_folder(tmp_path, policy, DialectConfig(name="template"))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r" has no tokenizer \(none of tokenizer\.json, .*\)$"),
        ("{}", r"^policy\.model: the tokenizer of .* cannot be loaded: "),
        ("no JSON", r"^policy\.model: the tokenizer of .* cannot be loaded: "),
    ],
)
def test_a_model_folder_without_a_tokenizer_is_refused_in_one_line(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    policy = PolicyConfig(model=str(tmp_path), max_model_len=64)
    with pytest.raises(ConfigError, match=problem) as refused:
        read_model_folder(tmp_path, policy, DialectConfig())
    assert "\n" not in str(refused.value)


def test_a_turn_ends_by_the_end_of_text_of_the_tokenizer_too(tmp_path: Path) -> None:
    """vLLM ends a turn there whatever the stops are: unknown to the dialect, an answer would be
    taken for a turn that was cut."""
    made = train_tokenizer(["find book hotel"] * 3, 290)
    made.eos_token = "<|endoftext|>"
    save_tokenizer(made, tmp_path)
    policy = PolicyConfig(model=str(tmp_path), max_model_len=64)
    files = read_model_folder(tmp_path, policy, DialectConfig())
    [end] = files.tokenizer.encode("<|endoftext|>")
    assert files.dialect.stop_ids == (*files.tokenizer.encode("<|im_end|>"), end)
    message = [*files.tokenizer.encode("find"), end]
    assert files.dialect.parse_turn(np.zeros(0, np.int32), message, ()).done


def test_a_chat_template_of_the_run_replaces_that_of_the_model(tmp_path: Path) -> None:
    """Prompts, rehearsal and calls go by it."""
    tokenizer_with(chatml("")).fast.save_pretrained(tmp_path / "model")
    policy = PolicyConfig(model=str(tmp_path / "model"), max_model_len=64)
    with pytest.raises(ConfigError, match="no call is read"):
        read_model_folder(tmp_path / "model", policy, DialectConfig())
    own = tmp_path / "own.jinja"
    own.write_text(calls_in(NATIVE_CALLS).replace("system\n", "own\n"))
    files = read_model_folder(
        tmp_path / "model", policy, DialectConfig(name="template", chat_template=str(own))
    )
    shown = files.dialect.prompt_ids(PromptFacts("Go.", "", {}), [Tool("look", "Looks.", {})])
    assert "<|im_start|>own\n" in files.tokenizer.decode(shown)


def test_a_model_that_sees_is_rehearsed_with_pictures(tmp_path: Path) -> None:
    def check(template: str, kind: str = "qwen3_vl") -> ModelFiles:
        made = tokenizer_that_sees(template)
        made.fast.save_pretrained(tmp_path)
        start, end, image, video = vision_ids(made)
        settings = {
            "model_type": kind,
            "vision_config": {"patch_size": 16},
            "vision_start_token_id": start,
            "vision_end_token_id": end,
            "image_token_id": image,
            "video_token_id": video,
        }
        (tmp_path / "config.json").write_text(json.dumps(settings))
        policy = PolicyConfig(model=str(tmp_path), max_model_len=64, vision=VisionConfig())
        return read_model_folder(tmp_path, policy, DialectConfig(name="template"))

    (tmp_path / "preprocessor_config.json").write_text("{}")
    files = check(seeing("tool"))
    assert files.vision is not None
    assert files.vision.image_pad == files.tokenizer.encode(PAD)[0]
    with pytest.raises(ConfigError, match=r"^policy\.model: .*leaves out pictures in tool mess"):
        check(seeing("tool", "user"))
    with pytest.raises(ConfigError, match=r"^policy\.vision: models of type 'gemma3' are not"):
        check(seeing(), "gemma3")


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read: .*No such file"), (b"\xff", "cannot be read"), (b" \n", "is empty")],
)
def test_a_chat_template_that_is_no_text_is_refused_by_its_key(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    tokenizer_with(calls_in(NATIVE_CALLS)).fast.save_pretrained(tmp_path / "model")
    own = tmp_path / "own.jinja"
    if content is not None:
        own.write_bytes(content)
    policy = PolicyConfig(model=str(tmp_path / "model"), max_model_len=64)
    with pytest.raises(ConfigError, match=rf"^rollout\.dialect\.chat_template: .*{problem}"):
        read_model_folder(tmp_path / "model", policy, DialectConfig(chat_template=str(own)))
