import pytest

from flotilla_common.domain.attempts import StopReason
from flotilla_learner.algo.overlong import not_overlong_mask, soft_penalties
from flotilla_learner.config.algorithm import OverlongConfig

REASONS = [StopReason.DONE, StopReason.GENERATION_LENGTH, StopReason.CONTEXT_OVERFLOW]


def test_nothing_is_masked_by_default() -> None:
    assert not_overlong_mask(REASONS, [1, 10**6, 3], OverlongConfig()).all()


def test_masks_by_stop_reason_and_by_length_together() -> None:
    by_reason = OverlongConfig(mask_stop_reasons=(StopReason.GENERATION_LENGTH,))
    assert not_overlong_mask(REASONS, [5, 5, 5], by_reason).tolist() == [True, False, True]
    by_length = OverlongConfig(mask_above_tokens=100)
    assert not_overlong_mask(REASONS, [101, 100, 99], by_length).tolist() == [False, True, True]
    both = OverlongConfig(mask_stop_reasons=(StopReason.GENERATION_LENGTH,), mask_above_tokens=100)
    assert not_overlong_mask(REASONS, [101, 5, 99], both).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (100, -1.0), (101, -1.0), (1000, -1.0)],
)
def test_the_soft_penalty_falls_linearly_over_the_buffer(tokens: int, penalty: float) -> None:
    config = OverlongConfig(soft_limit=100, soft_buffer=40)
    assert soft_penalties(["g"], [0], [tokens], config).tolist() == [pytest.approx(penalty)]
    heavy = OverlongConfig(soft_limit=100, soft_buffer=40, soft_weight=0.5)
    assert soft_penalties(["g"], [0], [tokens], heavy).tolist() == [pytest.approx(penalty / 2)]


def test_the_soft_penalty_is_of_the_whole_attempt() -> None:
    config = OverlongConfig(soft_limit=100, soft_buffer=40)
    found = soft_penalties(["g", "g", "g", "h"], [0, 0, 1, 0], [50, 30, 50, 80], config)
    assert found.tolist() == pytest.approx([-0.5, -0.5, 0.0, -0.5])


def test_without_a_limit_there_is_no_soft_penalty() -> None:
    assert soft_penalties(["g"], [0], [10**6], OverlongConfig()).tolist() == [0.0]
