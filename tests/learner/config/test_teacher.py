"""A spec with a teacher asks for nothing that the teacher cannot do, or that would be ignored."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_learner.config.learner import LearnerConfig

URL = "http://10.0.0.7:8000/v1"
RL: dict[str, Any] = {"tasks": "t.json", "steps": 2, "groups_per_step": 2, "group_size": 2}
SFT: dict[str, Any] = {
    "objective": "sft",
    "steps": 2,
    "sft": {"data": "d.npz", "sequences_per_step": 4},
}


def read(policy: dict[str, Any] | None = None, **values: Any) -> LearnerConfig:
    given = values if "objective" in values else {**RL, **values}
    config = parse_config(LearnerConfig, given, where="spec", section="learner")
    model = {"model": "m", "max_model_len": 64, **(policy or {})}
    config.check(parse_config(SharedConfig, {"name": "test", "policy": model}, where="spec"))
    return config


def refused(match: str, **values: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        read(**values)


def distilled(**values: Any) -> dict[str, Any]:
    return {"teacher": {"url": URL}, "algorithm": {"distillation": values}}


def test_a_url_is_enough() -> None:
    config = read(teacher={"url": f"{URL}/"})
    assert config.teacher is not None and config.teacher.url == URL
    chosen = config.algorithm.distillation
    assert (chosen.weight, chosen.alone, chosen.divergence, chosen.top_k) == (
        *(1.0, False),
        *("reverse_kl", 0),
    )


@pytest.mark.parametrize(
    "url", ["10.0.0.7:8000", "ftp://host/v1", "http://user:secret@host/v1", "http://host/v1?key=1"]
)
def test_what_is_no_url_of_an_endpoint_is_refused(url: str) -> None:
    refused("expected the URL of an endpoint", teacher={"url": url})


def test_a_key_in_the_spec_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="has no place in a spec") as raised:
        read(teacher={"url": URL, "api_key": "sk-0123456789"})
    assert "0123456789" not in str(raised.value)


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_what_sampled_tokens_do_not_estimate_needs_the_likeliest_ones(divergence: str) -> None:
    refused("set top_k", **distilled(divergence=divergence))
    read(**distilled(divergence=divergence, top_k=16))


def test_beta_belongs_to_jsd() -> None:
    refused(r"distillation\.beta", **distilled(beta=0.3, top_k=4))
    read(**distilled(beta=0.3, top_k=4, divergence="jsd"))


def test_settings_of_distillation_need_a_teacher() -> None:
    refused(r"distillation\.alone: nobody teaches", algorithm={"distillation": {"alone": True}})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"temperature": 0.8}, r"learner\.temperature"),
        ({"top_k": 40}, r"learner\.top_k: the policy samples from a part"),
        ({"constant_groups": "drop"}, r"learner\.constant_groups"),
        ({"policy": {"vision": {}}}, r"policy\.vision"),
        ({"engine": "tinker"}, r"learner\.engine"),
        (SFT, r"learner\.objective"),
    ],
)
def test_what_a_teacher_cannot_score_is_refused(values: dict[str, Any], key: str) -> None:
    refused(key, teacher={"url": URL}, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"advantage": "rloo"},
        {"advantage": "gae", "critic": {"lr": 1e-4}},
        {"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"}},
    ],
)
def test_alone_it_leaves_nothing_to_what_rewards_would_be_learned_by(
    values: dict[str, Any],
) -> None:
    algorithm = {**values, "distillation": {"alone": True}}
    refused("nothing is learned from rewards", teacher={"url": URL}, algorithm=algorithm)
    read(teacher={"url": URL}, algorithm=values)


def test_alone_it_may_be_held_near_the_start() -> None:
    algorithm = {"kl": {"coefficient": 0.1}, "distillation": {"alone": True}}
    read(teacher={"url": URL}, algorithm=algorithm)
