"""Scores of an evaluation, by hand."""

import pytest

from flotilla_common.domain.task_means import mean_interval
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt, rewards_by_task
from flotilla_reading.evaluation.scores import score_evaluation


def attempts(env: str, key: str, *rewards: float | None) -> list[EvaluatedAttempt]:
    return [EvaluatedAttempt(key, env, reward) for reward in rewards]


def test_every_environment_is_scored_and_ungraded_attempts_are_in_no_mean() -> None:
    made = [
        *attempts("shop", "a", 1.0, 0.0, 0.5, None),
        *attempts("shop", "b", 1.0, 1.0),
        *attempts("shop", "c", None, None),
        *attempts("web", "d", 0.0, 0.0),
    ]
    shop, web, every = score_evaluation(made, 2)
    assert (shop.env_key, web.env_key, every.env_key) == ("shop", "web", "all")
    assert (shop.tasks, shop.attempts, shop.graded, shop.ungraded) == (3, 8, 5, 3)
    assert shop.pass_at_1 is not None
    assert shop.pass_at_1.mean == pytest.approx((1 / 3 + 1) / 2)
    assert (shop.pass_at_1.low, shop.pass_at_1.high) == mean_interval([1 / 3, 1.0])
    assert shop.pass_at_k is not None
    assert shop.pass_at_k.mean == pytest.approx((2 / 3 + 1) / 2)
    assert shop.pass_power_k is not None
    assert shop.pass_power_k.mean == pytest.approx((0 + 1) / 2)
    assert shop.mean_reward == pytest.approx((0.5 + 1) / 2)
    assert every.pass_at_1 is not None
    assert every.pass_at_1.tasks == 3, "those with a grade"
    assert rewards_by_task(made)["c"] == []


def test_without_a_grade_there_is_no_score() -> None:
    env, every = score_evaluation(attempts("shop", "a", None), 1)
    assert env.pass_at_1 is every.pass_at_1 is every.mean_reward is None
    assert every.ungraded == 1
    (nothing,) = score_evaluation([], 1)
    assert (nothing.tasks, nothing.pass_at_1) == (0, None)
