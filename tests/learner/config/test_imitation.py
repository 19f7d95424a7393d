"""Specs with `learner.objective = "sft"` or `[learner.warm_start]`: what they need, and what is
refused with its reason."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_learner.config.learner import LearnerConfig

SFT = {"data": "demonstrations.npz", "sequences_per_step": 4}
SPEC: dict[str, Any] = {"objective": "sft", "sft": SFT, "steps": 3}


def checked(learner: dict[str, Any], **policy: Any) -> LearnerConfig:
    config = parse_config(LearnerConfig, learner, where="spec", section="learner")
    values = {"name": "t", "policy": {"model": "m", "max_model_len": 64, **policy}}
    config.check(parse_config(SharedConfig, values, where="spec"))
    return config


def refusal(learner: dict[str, Any], **policy: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(learner, **policy)
    return str(caught.value)


def test_tasks_and_groups_are_not_needed_and_no_samples_are_guarded() -> None:
    config = checked(SPEC)
    assert (config.tasks, config.groups_per_step, config.group_size) == ("", 0, 0)
    assert config.guard.mode == "off"
    checked({**SPEC, "algorithm": {"reduction": "sequence_mean"}, "lora": {"rank": 4}})


def test_reinforcement_learning_still_needs_them_and_each_is_named() -> None:
    wanted = "learner.tasks: missing; it has no default, nor have groups_per_step and group_size"
    assert wanted in refusal({"steps": 3})
    assert "learner.group_size: missing; it has no default" in refusal(
        {"steps": 3, "tasks": "t.json", "groups_per_step": 2}
    )
    assert "groups_per_step" in refusal(
        {"steps": 3, "tasks": "t.json", "groups_per_step": 0, "group_size": 2}
    )


def test_the_table_and_the_objective_need_each_other() -> None:
    assert "learner.sft: missing; its key `data` names" in refusal({"objective": "sft", "steps": 3})
    rl = {"steps": 3, "tasks": "t.json", "groups_per_step": 2, "group_size": 2}
    checked(rl)
    assert 'without learner.objective = "sft"' in refusal({**rl, "sft": SFT})


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"tasks": "t.json"}, "learner.tasks: learner.sft.data is what is trained on"),
        ({"group_size": 8}, "learner.group_size: demonstrations are no groups"),
        ({"max_staleness": 2}, "learner.max_staleness: nothing is sampled for a step"),
        ({"temperature": 0.7}, "learner.temperature: the likelihood is that at temperature 1"),
        ({"top_k": 8}, "learner.top_k: nothing is sampled to train on"),
        ({"guard": {"audit_tokens": 1}}, "learner.guard: no samples of engines"),
        ({"sampling": {"mixing": "proportional"}}, "learner.sampling: demonstrations are no"),
        ({"algorithm": {"loss": "gspo"}}, "learner.algorithm.loss: it is of reinforcement"),
        ({"algorithm": {"kl": {"coefficient": 0.1}}}, "learner.algorithm.kl: it is of"),
        ({"algorithm": {"mini_batches": 2}}, "learner.algorithm.mini_batches: it is of"),
        ({"engine": "tinker"}, "learner.engine: imitation is trained by own ranks only"),
    ],
)
def test_what_has_no_meaning_here_is_refused_with_its_reason(
    learner: dict[str, Any], message: str
) -> None:
    assert message in refusal({**SPEC, **learner})


def test_all_such_keys_are_named_at_once_and_those_at_their_default_are_none() -> None:
    said = refusal({**SPEC, "min_group": 3, "max_refill": 2, "algorithm": {"epochs": 2}})
    for key in ("learner.min_group", "learner.max_refill", "learner.algorithm.epochs"):
        assert key in said
    checked({**SPEC, "max_staleness": 1, "algorithm": {"loss": "ppo_clip"}})


def test_pictures_and_experts_are_refused_because_demonstrations_have_none() -> None:
    assert "policy.vision: demonstrations with pictures" in refusal(SPEC, vision={})
    assert "policy.routing_replay: demonstrations name no" in refusal(SPEC, routing_replay="replay")


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_that_leaves_nothing_to_train_on_is_refused(share: float) -> None:
    assert "learner.sft.heldout" in refusal({**SPEC, "sft": {**SFT, "heldout": share}})


RL: dict[str, Any] = {"tasks": "t.json", "groups_per_step": 2, "group_size": 2, "steps": 3}
WARM = {**SFT, "steps": 5}


def test_a_warm_start_comes_before_the_steps_and_keeps_what_they_are_guarded_by() -> None:
    config = checked({**RL, "warm_start": {**WARM, "lr": 1e-3}})
    assert (config.warm_steps, config.steps, config.total_steps) == (5, 3, 8)
    assert config.guard.mode == "enforce"
    assert config.imitation is config.warm_start
    checked({**RL, "warm_start": WARM, "algorithm": {"loss": "gspo", "epochs": 2}})


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({**SFT}, "learner.warm_start.steps"),
        ({**WARM, "steps": 0}, "learner.warm_start.steps"),
        ({**WARM, "epochs": 1}, "learner.warm_start.epochs"),
        ({**WARM, "lr": 0.0}, "learner.warm_start.lr"),
        ({"steps": 5, "sequences_per_step": 4}, "learner.warm_start.data"),
    ],
)
def test_a_warm_start_with_a_missing_or_wrong_key_is_refused(
    table: dict[str, Any], key: str
) -> None:
    assert key in refusal({**RL, "warm_start": table})


def test_a_warm_start_is_refused_where_it_cannot_imitate_with_the_reason() -> None:
    assert "all steps imitate" in refusal({**SPEC, "warm_start": WARM})
    rl = {**RL, "warm_start": WARM}
    said = refusal({**rl, "engine": "tinker"})
    assert "learner.warm_start does not work with this spec" in said
    assert "learner.engine: imitation is trained by own ranks only" in said
    assert "policy.vision: demonstrations with pictures" in refusal(rl, vision={})
    assert "policy.routing_replay: demonstrations name no" in refusal(rl, routing_replay="replay")


@pytest.mark.parametrize(
    ("warm", "every", "versions"),
    [(0, 2, [2, 4]), (0, 0, []), (3, 2, [3, 5, 7]), (3, 0, [3]), (3, 9, [3])],
)
def test_evaluations_during_training_count_from_the_end_of_the_warm_start(
    warm: int, every: int, versions: list[int]
) -> None:
    table = {"warm_start": {**SFT, "steps": warm}} if warm else {}
    config = checked({**RL, **table, "steps": 5, "eval": {"every": every}})
    assert [v for v in range(12) if config.evaluates_during(v)] == versions
