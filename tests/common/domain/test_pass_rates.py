"""pass@k against values worked out by hand."""

import pytest

from flotilla_common.domain.pass_rates import pass_at_k, pass_power_k


@pytest.mark.parametrize(
    ("attempts", "passed", "k", "expected"),
    # 1 - C(n - c, k) / C(n, k): 1 - 3/10, 1 - 1/10 (not the biased 1 - 0.6^3), all, none.
    [(5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 2, 3, 0.9), (4, 4, 2, 1.0), (4, 0, 4, 0.0)],
)
def test_pass_at_k_is_unbiased(attempts: int, passed: int, k: int, expected: float) -> None:
    assert pass_at_k(attempts, passed, k) == pytest.approx(expected)


def test_pass_at_k_needs_k_attempts() -> None:
    with pytest.raises(ValueError, match="needs 3 attempts"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize(
    ("attempts", "passed", "k", "expected"),
    # C(c, k) / C(n, k): 2/5, 1/10 (not the biased 0.4^2), none, all.
    [(5, 2, 1, 0.4), (5, 2, 2, 0.1), (5, 2, 3, 0.0), (4, 4, 4, 1.0)],
)
def test_pass_power_k_is_unbiased(attempts: int, passed: int, k: int, expected: float) -> None:
    assert pass_power_k(attempts, passed, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match=f"needs {attempts + 1} attempts"):
        pass_power_k(attempts, passed, attempts + 1)
