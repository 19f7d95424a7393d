import json
from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.checkpoints.adapters.model_assets import vocabulary_of


def vocabulary_with(folder: Path, config: object) -> int:
    """The vocabulary of a model that has this configuration, and no weights."""
    (folder / "config.json").write_text(json.dumps(config))
    return vocabulary_of(PolicyConfig(model=str(folder), max_model_len=8))


def test_the_vocabulary_is_that_of_the_models_text_part(tmp_path: Path) -> None:
    assert vocabulary_with(tmp_path, {"vocab_size": 97}) == 97
    config = {"vocab_size": 1, "text_config": {"vocab_size": 151_936}}
    assert vocabulary_with(tmp_path, config) == 151_936


@pytest.mark.parametrize("config", [{}, {"vocab_size": None}, []])
def test_a_model_without_one_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json with its vocab_size"):
        vocabulary_with(tmp_path, config)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        vocabulary_of(PolicyConfig(model=str(tmp_path), max_model_len=8))
