"""What `[learner]` refuses by itself."""

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.learner import LearnerConfig

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


def test_as_many_candidates_as_the_model_has_tokens_are_refused_with_its_number() -> None:
    parse(top_k=40).check_vocabulary(41)
    parse().check_vocabulary(2)
    with pytest.raises(ConfigError, match=r"learner\.top_k: 40, but policy\.model has only 40"):
        parse(top_k=40).check_vocabulary(40)
    shared = {"divergence": "forward_kl", "top_k": 64, "alone": True}
    taught = parse(
        teacher={"url": "http://127.0.0.1:1/v1", "model": "t"}, algorithm={"distillation": shared}
    )
    with pytest.raises(ConfigError, match=r"distillation\.top_k: 64, but .* only 50 tokens"):
        taught.check_vocabulary(50)


@pytest.mark.parametrize("keys", [{"top_k": 1}, {"top_k": 65}, {"top_k": 0}, {"top_p": 0.0}])
def test_candidates_out_of_bounds_are_refused(keys: dict[str, float]) -> None:
    (name,) = keys
    with pytest.raises(ConfigError, match=f"learner.{name}"):
        parse(**keys)
