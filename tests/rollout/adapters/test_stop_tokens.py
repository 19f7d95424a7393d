"""A turn ends where the model's own generation config ends a text, and nowhere else."""

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.stop_tokens import check_stop_ids, read_eos_ids


def folder_with(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("eos", "ids"), [([128001, 128008], [128001, 128008]), (7, [7]), (None, [])]
)
def test_one_id_or_more_are_read(tmp_path: Path, eos: object, ids: list[int]) -> None:
    assert read_eos_ids(folder_with(tmp_path, {"eos_token_id": eos, "temperature": 0.6})) == ids


def test_a_model_without_a_generation_config_has_none(tmp_path: Path) -> None:
    assert read_eos_ids(tmp_path) == []


@pytest.mark.parametrize("content", [[], {"eos_token_id": ["<|eot_id|>"]}, {"eos_token_id": True}])
def test_what_is_no_id_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ConfigError, match=r"^policy\.model: .*generation_config\.json"):
        read_eos_ids(folder_with(tmp_path, content))


def test_an_id_outside_of_the_vocabulary_is_refused_with_the_fix(tmp_path: Path) -> None:
    check_stop_ids([10**6], tmp_path, trust_remote_code=False)
    Qwen3Config(vocab_size=100).save_pretrained(tmp_path)
    check_stop_ids([0, 99], tmp_path, trust_remote_code=False)
    with pytest.raises(ConfigError, match=r"token 100, -1, and .* vocabulary of 100: correct eos"):
        check_stop_ids([100, 5, -1], tmp_path, trust_remote_code=False)
