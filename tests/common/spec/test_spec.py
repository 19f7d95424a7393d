"""The shared part of a run spec: what scaling does to a model's positions."""

import pytest
from pydantic import ValidationError

from flotilla_common.spec.spec import PolicyConfig


def policy(**scaling: str | int | float) -> PolicyConfig:
    return PolicyConfig(model="m", max_model_len=8, rope_scaling=scaling or None)


def test_yarn_scales_the_positions_a_model_was_trained_with() -> None:
    qwen3 = policy(rope_type="yarn", factor=2.0, original_max_position_embeddings=32_768)
    assert qwen3.scaled_positions(40_960) == 65_536
    assert qwen3.scaled_positions(131_072) == 131_072, "never fewer than the model's own number"


def test_positions_stay_without_yarn() -> None:
    assert policy().scaled_positions(40_960) == 40_960
    assert policy(rope_type="linear", factor=2.0).scaled_positions(40_960) == 40_960


@pytest.mark.parametrize("missing", ["factor", "original_max_position_embeddings"])
def test_yarn_without_its_numbers_is_refused(missing: str) -> None:
    whole: dict[str, str | int | float] = {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    del whole[missing]
    with pytest.raises(ValidationError, match=f"yarn needs {missing}"):
        policy(**whole)
    with pytest.raises(ValidationError, match=f"yarn needs {missing}"):
        policy(**whole, **{missing: "many"})
