"""What a spec with [policy.vision] may not ask of our own ranks."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_learner.config.learner import LearnerConfig

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LEAST = {"tasks": "t", "steps": 1, "groups_per_step": 1, "group_size": 2}


def check(learner: dict[str, Any], vision: dict[str, Any] | None, **policy: Any) -> None:
    config = parse_config(LearnerConfig, {**LEAST, **learner}, where="spec", section="learner")
    seen = {} if vision is None else {"vision": vision}
    given = {"name": "x", "policy": {"model": "m", "max_model_len": 64, **seen, **policy}}
    config.check(parse_config(SharedConfig, given, where="spec"))


@pytest.mark.parametrize(
    ("learner", "vision", "policy", "named"),
    [
        ({"lora": {"rank": 8}}, {"tower": "trained"}, {}, "learner.lora"),
        ({"lora": {"rank": 8}}, {"projector": "trained"}, {}, 'projector to "frozen"'),
        ({"algorithm": {"advantage": "gae"}}, {}, {}, "learner.algorithm.advantage"),
        ({}, {}, {"rope_scaling": YARN}, "policy.rope_scaling"),
    ],
)
def test_what_ranks_do_not_train_on_pictures_is_refused_by_name(
    learner: dict[str, Any], vision: dict[str, Any], policy: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=r"policy\.vision") as caught:
        check(learner, vision, **policy)
    assert named in str(caught.value)
    # Without pictures it is no problem.
    check(learner, None, **policy)


def test_everything_else_is_accepted() -> None:
    check({"lora": {"rank": 8}}, {})
    check({"rank": {"shard": True, "processes": 2}}, {"tower": "trained", "projector": "trained"})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check({"algorithm": {"advantage": "gae"}}, {}, rope_scaling=YARN)
    assert len(str(caught.value).splitlines()) == 3
