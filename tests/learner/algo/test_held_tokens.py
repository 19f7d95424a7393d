import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_learner.algo.held_tokens import UpdateTokens, draw_covariant
from tests.learner.algo.support import config

# Of means 0.5 and -2: covariances of 2, -2, -1.5, 1.5, 0 and 0.
ADVANTAGES = np.array([2.5, 2.5, -1.0, -1.0, 0.0, 0.0])
LOGPROBS = np.array([-1.0, -3.0, -1.0, -3.0, -2.0, -2.0])


def held(
    old: NDArray[np.float64] = LOGPROBS,
    *,
    seed: int = 0,
    share: float = 1.0,
    low: float = 1.0,
    high: float = 5.0,
) -> list[int]:
    """Places of the tokens that are held, with the default clips."""
    chosen = config(clip_cov={"share": share, "low": low, "high": high})
    tokens = UpdateTokens(ADVANTAGES, LOGPROBS, old)
    found = draw_covariant(tokens, chosen, np.random.default_rng(seed))
    return np.flatnonzero(found).tolist()


def test_tokens_whose_advantage_goes_with_their_logprob_are_held() -> None:
    assert held() == [0, 3]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.6, 5.0, [0]), (1.0, 1.9, [3]), (-1.6, -1.0, [2]), (3.0, 5.0, [])],
)
def test_only_covariances_within_both_bounds_are_candidates(
    low: float, high: float, expected: list[int]
) -> None:
    assert held(low=low, high=high) == expected


def test_what_the_clip_holds_already_is_no_candidate() -> None:
    # Token 0 has become 1.35 times as likely with A > 0, token 3 0.74 times with A < 0.
    moved = LOGPROBS - np.array([0.3, 0.0, 0.0, -0.3, 0.0, 0.0])
    assert held(moved) == []
    # Not against the advantage, nor within the clip.
    against = LOGPROBS - np.array([-0.3, 0.0, 0.0, 0.3, 0.0, 0.0])
    assert held(against) == [0, 3]
    assert held(LOGPROBS - np.array([0.2, 0.0, 0.0, -0.2, 0.0, 0.0])) == [0, 3]


@pytest.mark.parametrize(("share", "count"), [(1e-4, 1), (0.34, 2), (0.2, 1), (1.0, 6)])
def test_a_share_of_all_tokens_is_drawn_and_at_least_one(share: float, count: int) -> None:
    assert len(held(share=share, low=-10, high=10)) == count


def test_every_candidate_is_drawn_as_often() -> None:
    drawn = [held(seed=seed, share=1e-4, low=-10, high=10)[0] for seed in range(600)]
    # Six standard deviations of a binomial of 600 draws.
    assert np.bincount(drawn, minlength=6) == pytest.approx(np.full(6, 100), abs=55)


def test_an_update_of_no_tokens_holds_none() -> None:
    none = np.zeros(0)
    found = draw_covariant(UpdateTokens(none, none, none), config(), np.random.default_rng(0))
    assert found.shape == (0,)


def test_without_a_lower_clip_a_token_that_vanishes_is_still_a_candidate() -> None:
    tokens = UpdateTokens(ADVANTAGES, LOGPROBS, LOGPROBS + np.array([0, 0, 0, 30.0, 0, 0]))
    chosen = config(clip_low=1.0, clip_cov={"share": 1.0})
    found = draw_covariant(tokens, chosen, np.random.default_rng(0))
    assert np.flatnonzero(found).tolist() == [0, 3]
