import numpy as np
import pytest

from services.learner.algo.advantages import ESTIMATORS, dr_grpo, group_advantages, grpo, rloo


def test_grpo_of_half_passed_group_in_closed_form() -> None:
    # Mean 0.5, sample standard deviation sqrt(4 * 0.25 / 3).
    scale = np.sqrt(1 / 3) + 1e-6
    expected = np.array([0.5, 0.5, -0.5, -0.5]) / scale
    np.testing.assert_allclose(grpo(np.array([1.0, 1.0, 0.0, 0.0])), expected, rtol=1e-15)


def test_dr_grpo_only_centres() -> None:
    np.testing.assert_allclose(dr_grpo(np.array([3.0, 0.0, 0.0])), [2.0, -1.0, -1.0])


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    rewards = np.array([1.0, 0.25, 0.5])
    others = [(0.25 + 0.5) / 2, (1.0 + 0.5) / 2, (1.0 + 0.25) / 2]
    np.testing.assert_allclose(rloo(rewards), rewards - others, rtol=1e-15)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_groups_without_a_signal_are_exactly_zero(name: str, rewards: list[float]) -> None:
    ids = ["g"] * len(rewards)
    result = group_advantages(ids, range(len(rewards)), rewards, ESTIMATORS[name])
    assert result.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_group_sees_exactly_its_own_members_in_any_order(name: str) -> None:
    ids = ["a", "b", "a", "b", "a"]
    rewards = [1.0, 0.5, 0.0, 0.0, 0.25]
    result = group_advantages(ids, [0, 0, 1, 1, 2], rewards, ESTIMATORS[name])
    alone = ESTIMATORS[name](np.array([1.0, 0.0, 0.25]))
    np.testing.assert_array_equal(result[[0, 2, 4]], alone)
    np.testing.assert_array_equal(result[[1, 3]], ESTIMATORS[name](np.array([0.5, 0.0])))


def test_two_sequences_of_one_attempt_count_once() -> None:
    result = group_advantages(["g"] * 3, [0, 0, 1], [1.0, 1.0, 0.0], dr_grpo)
    assert result.tolist() == [0.5, 0.5, -0.5]


def test_two_rewards_for_one_attempt_are_refused() -> None:
    with pytest.raises(ValueError, match="has two rewards"):
        group_advantages(["g", "g"], [0, 0], [1.0, 0.0], grpo)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="is nan"):
        group_advantages(["g", "g"], [0, 1], [float("nan"), 0.0], grpo)
