"""What a spec with learner.engine = "tinker" may not ask for."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_learner.config.algorithm import LOSS_NAMES
from flotilla_learner.config.hosted import SERVICE_LOSSES
from flotilla_learner.config.learner import LearnerConfig

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LEAST = {"tasks": "t", "steps": 1, "groups_per_step": 1, "group_size": 2}


def checked(learner: dict[str, Any], **policy: Any) -> LearnerConfig:
    values = {**LEAST, "engine": "tinker", "lora": {"rank": 8}, **learner}
    config = parse_config(LearnerConfig, values, where="spec", section="learner")
    given = {"name": "x", "policy": {"model": "m", "max_model_len": 64, **policy}}
    config.check(parse_config(SharedConfig, given, where="spec"))
    return config


def refusal(learner: dict[str, Any], **policy: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(learner, **policy)
    return str(caught.value)


def test_one_key_is_enough() -> None:
    assert checked({}).guard.mode == "off"


def test_what_own_ranks_guard_stays_guarded() -> None:
    assert parse_config(LearnerConfig, LEAST, where="spec").guard.mode == "enforce"


def test_defaults_may_be_written_down() -> None:
    checked(
        {
            "temperature": 1.0,
            "optimizer": {"betas": [0.9, 0.95]},
            "rank": {"device": "cpu"},
            "weights": {"transfer": "auto", "network": "public"},
            "algorithm": {"kl": {"coefficient": 0.0}, "proximal": "behaviour"},
            "guard": {"mode": "off", "tail_bound": 0.5},
            "lora": {"rank": 8, "alpha": 32.0, "target_modules": "all-linear"},
        }
    )


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_a_loss_that_the_service_lacks_is_refused_with_those_that_it_has(loss: str) -> None:
    learner = {"algorithm": {"loss": loss}}
    if loss in SERVICE_LOSSES:
        checked(learner)
    else:
        wanted = "it has ppo_clip, cispo, gspo, importance_sampling"
        assert wanted in refusal(learner)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"lora": None}, "learner.lora.rank: the service trains adapters; set their rank"),
        ({"lora": {"rank": 8, "alpha": 16.0}}, "learner.lora.alpha: the service's is 32"),
        ({"lora": {"rank": 8, "target_modules": ["q_proj"]}}, "learner.lora.target_modules"),
        ({"temperature": 0.9}, "learner.temperature: the service trains at temperature 1"),
        ({"top_k": 8}, "learner.top_k: the service does not name what it sampled from"),
        ({"guard": {"mode": "warn"}}, "learner.guard.mode: the service scores no samples again"),
        ({"guard": {"audit_tokens": 7}}, "learner.guard.audit_tokens"),
        ({"rank": {"device": "cuda"}}, "learner.rank.device"),
        ({"rank": {"burn_in": {"enabled": False}}}, "learner.rank.burn_in"),
        ({"weights": {"transfer": "nccl"}}, "learner.weights.transfer"),
        ({"weights": {"delta": "off"}}, "learner.weights.delta"),
        ({"algorithm": {"plugins": ["own"]}}, "learner.algorithm.plugins"),
        ({"algorithm": {"advantage": "gae"}}, "learner.algorithm.advantage"),
        ({"algorithm": {"proximal": "trainer"}}, "learner.algorithm.proximal"),
        ({"algorithm": {"entropy_coefficient": 0.1}}, "learner.algorithm.entropy_coefficient"),
        ({"algorithm": {"kl": {"coefficient": 0.1}}}, "learner.algorithm.kl.coefficient"),
        (
            {"algorithm": {"correction": {"token_mask": [0.5, 2.0]}}},
            "learner.algorithm.correction.token_mask",
        ),
        ({"algorithm": {"critic": {"lr": 1e-3}}}, "learner.algorithm.critic.lr"),
    ],
)
def test_what_the_service_lacks_is_named(learner: dict[str, Any], message: str) -> None:
    assert message in refusal(learner)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"adapter_rank": 8}, "policy.adapter_rank"),
        ({"routing_replay": "rollout"}, "policy.routing_replay"),
        ({"rope_scaling": YARN}, "policy.rope_scaling"),
        ({"vision": {}}, "policy.vision: the service is shown no pictures"),
    ],
)
def test_keys_of_the_policy_are_named(policy: dict[str, Any], message: str) -> None:
    assert message in refusal({}, **policy)


def test_all_problems_are_told_in_one_message() -> None:
    text = refusal({"temperature": 0.5, "rank": {"device": "cuda"}})
    assert text.count("\n  learner.") == 2
