"""What `[learner]` refuses by itself."""

import pytest

from services.common.rpc.errors import ConfigError
from services.common.spec.config import parse_config
from services.learner.config.learner import LearnerConfig

LEAST = {"tasks": "t", "steps": 1, "groups_per_step": 1, "group_size": 2}


def parse(**keys: object) -> LearnerConfig:
    return parse_config(LearnerConfig, {**LEAST, **keys}, where="spec", section="learner")


def test_top_p_alone_is_refused_with_the_reason_and_the_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"top_p: 0\.95 alone may keep the whole vocabulary"
    ) as it:
        parse(top_p=0.95)
    assert "set learner.top_k too (2 to 64), or leave top_p out" in str(it.value)


def test_top_k_holds_alone_or_with_top_p_and_all_of_top_p_is_none() -> None:
    assert (parse(top_k=40).top_k, parse(top_k=40, top_p=0.95).top_p) == (40, 0.95)
    assert (parse(top_p=1.0).top_k, parse().top_p) == (None, 1.0)


@pytest.mark.parametrize("keys", [{"top_k": 1}, {"top_k": 65}, {"top_k": 0}, {"top_p": 0.0}])
def test_candidates_out_of_bounds_are_refused(keys: dict[str, float]) -> None:
    (name,) = keys
    with pytest.raises(ConfigError, match=f"learner.{name}"):
        parse(**keys)
