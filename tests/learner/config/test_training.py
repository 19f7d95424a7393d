"""The section of a service that trains at callers' requests."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig, parse_shared
from flotilla_learner.config.training import TrainingConfig, TrainingServiceConfig
from tests.support.repository import ROOT

SHARED: dict[str, Any] = {"name": "served", "policy": {"model": "m", "max_model_len": 64}}


def shared(**policy: object) -> SharedConfig:
    return parse_shared({**SHARED, "policy": {**SHARED["policy"], **policy}}, where="spec")


def test_it_needs_no_key_of_a_run() -> None:
    config = parse_config(TrainingServiceConfig, {}, where="spec", section="learner")
    config.check(shared())
    assert config.training == TrainingConfig(max_models=8, max_rank=64)


def test_a_key_of_a_run_is_named() -> None:
    with pytest.raises(ConfigError, match=r"learner\.steps: unknown key; known: rank, training"):
        parse_config(TrainingServiceConfig, {"steps": 3}, where="spec", section="learner")


@pytest.mark.parametrize(
    ("rank", "policy", "key"),
    [
        ({"shard": True}, {}, "learner.rank.shard"),
        ({"nodes": 2}, {}, "learner.rank.nodes"),
        ({"compile": True}, {}, "learner.rank.compile"),
        ({"offload_optimizer": True}, {}, "learner.rank.offload_optimizer"),
        ({}, {"routing_replay": "replay"}, "policy.routing_replay"),
        ({}, {"vision": {}}, "policy.vision"),
    ],
)
def test_what_it_does_not_have_is_refused(
    rank: dict[str, object], policy: dict[str, object], key: str
) -> None:
    config = TrainingServiceConfig.model_validate({"rank": rank})
    with pytest.raises(ConfigError, match=f"{key}: .* leave it out"):
        config.check(shared(**policy))


def test_the_page_names_each_key_with_its_default() -> None:
    page = (ROOT / "docs/running.md").read_text()
    for name, field in TrainingConfig.model_fields.items():
        assert f"`learner.training.{name}` ({field.default})" in page
