"""A model's config.json shows whether there are experts to replay."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.models.expert_models import check_routing_replay, count_experts
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8, "num_experts": None}, (256, 8)),
        ({"text_config": {"num_experts": 60, "num_experts_per_tok": 4}}, (60, 4)),
        ({"hidden_size": 64}, (0, 0)),
    ],
)
def test_experts_are_counted_by_whatever_name_a_family_has(
    settings: dict[str, Any], found: tuple[int, int]
) -> None:
    assert count_experts(settings) == found


@pytest.mark.parametrize("mode", ["measure", "replay"])
def test_a_dense_model_is_refused_before_anything_is_loaded(mode: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    given = {"model": "org/dense", "max_model_len": 64}
    check_routing_replay(PolicyConfig.model_validate(given), tmp_path)
    policy = PolicyConfig.model_validate({**given, "routing_replay": mode})
    with pytest.raises(ConfigError) as caught:
        check_routing_replay(policy, tmp_path)
    assert str(caught.value) == (
        f'policy.routing_replay: "{mode}", but org/dense has no experts; set it to "off"'
    )
