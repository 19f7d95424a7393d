import numpy as np
import pytest

from flotilla_learner.algo.predicting_positions import predicting_positions


def test_the_token_before_each_policy_token_predicts_it() -> None:
    mask = np.array([False, False, True, True, False, True])
    assert predicting_positions(mask).tolist() == [1, 2, 4]


def test_a_policy_cannot_have_written_the_first_token() -> None:
    with pytest.raises(ValueError, match="first token"):
        predicting_positions(np.array([True, False]))
