"""Retries of calls, within a budget."""

from flotilla_env_gateway.tools.call_retries import RetryBudget


def test_retries_are_a_share_of_first_attempts() -> None:
    budget = RetryBudget(ratio=0.1, cap=2.0)
    spent = 0
    for _ in range(100):
        budget.deposit()
        spent += budget.try_spend()
    assert spent <= 12
