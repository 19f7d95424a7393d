import numpy as np
import pytest

from services.learner.algo.masks import predicting_positions, without_signal


def test_the_token_before_each_policy_token_predicts_it() -> None:
    mask = np.array([False, False, True, True, False, True])
    assert predicting_positions(mask).tolist() == [1, 2, 4]


def test_a_policy_cannot_have_written_the_first_token() -> None:
    with pytest.raises(ValueError, match="first token"):
        predicting_positions(np.array([True, False]))


def test_groups_of_one_reward_or_one_attempt_have_no_signal() -> None:
    found = without_signal(["a", "b", "a", "b", "c"], [1.0, 1.0, 0.0, 1.0, 0.3])
    assert found.tolist() == [False, True, False, True, True]
