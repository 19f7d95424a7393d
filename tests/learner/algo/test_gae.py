"""Advantages of single tokens: of returns over the batch, and with a critic."""

import numpy as np
import pytest

from flotilla_learner.algo.advantages import ADVANTAGES, BatchRewards, critic_targets
from flotilla_learner.algo.gae import compute_gae, returns_to_go, whiten
from flotilla_learner.config.algorithm import AlgorithmConfig, CriticConfig


def found(name: str, batch: BatchRewards, config: AlgorithmConfig | None = None) -> np.ndarray:
    return np.concatenate(ADVANTAGES.get(name)(batch, config or AlgorithmConfig()))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_gae_is_the_double_sum_of_its_definition(length: int) -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=length), rng.normal(size=length)
    discount, decay = 0.95, 0.8
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + discount * following[t] - values[t] for t in range(length)]
    expected = [
        sum((discount * decay) ** (later - t) * deltas[later] for later in range(t, length))
        for t in range(length)
    ]
    estimate = compute_gae(rewards, values, discount, decay)
    np.testing.assert_allclose(estimate.advantages, expected, rtol=1e-12)
    np.testing.assert_allclose(estimate.returns, np.array(expected) + values, rtol=1e-12)


def test_at_the_ends_of_the_trace_decay_gae_is_one_step_and_the_whole_return() -> None:
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.4, 0.7])
    one_step = compute_gae(rewards, values, 1.0, 0.0).advantages
    np.testing.assert_allclose(one_step, [0.2, 0.3, 0.3])
    np.testing.assert_allclose(compute_gae(rewards, values, 1.0, 1.0).advantages, 1.0 - values)
    assert compute_gae(rewards, values, 1.0, 1.0).returns.tolist() == [1.0, 1.0, 1.0]


def test_returns_are_sums_to_the_end() -> None:
    assert returns_to_go(np.array([1.0, 2.0, 4.0])).tolist() == [7.0, 6.0, 4.0]


def test_whitening_takes_mean_and_unbiased_deviation() -> None:
    values = whiten(np.array([1.0, 2.0, 4.0]))
    assert values.mean() == pytest.approx(0.0)
    assert values.std(ddof=1) == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("values", [[], [0.1], [0.1] * 3])
def test_whitening_what_does_not_vary_gives_exactly_zero(values: list[float]) -> None:
    assert whiten(np.array(values)).tolist() == [0.0] * len(values)


def test_reinforce_pp_compares_with_all_tokens_of_the_batch() -> None:
    tokens = [np.zeros(2), np.zeros(1), np.zeros(3)]
    batch = BatchRewards(["a", "b", "b"], [0, 0, 1], [1.0, 0.0, 0.5], tokens)
    returns = np.array([1.0, 1.0, 0.0, 0.5, 0.5, 0.5])
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found("reinforce_pp", batch), expected, rtol=1e-12)


def test_reinforce_pp_learns_from_a_constant_group_but_not_from_a_constant_batch() -> None:
    """Its baseline is the batch's: a group that passed whole is better than average."""
    tokens = [np.zeros(1)] * 4
    batch = BatchRewards(["a", "a", "b", "b"], [0, 1, 0, 1], [1.0, 1.0, 0.0, 0.0], tokens)
    values = found("reinforce_pp", batch)
    assert (values[:2] > 0).all()
    assert (values[2:] < 0).all()
    same = BatchRewards(["a", "a", "b", "b"], [0, 1, 0, 1], [0.1] * 4, tokens)
    assert found("reinforce_pp", same).tolist() == [0.0] * 4


def test_reinforce_pp_counts_the_kl_penalties_from_each_token_on() -> None:
    penalties = [np.array([-0.1, -0.2]), np.array([-0.4])]
    batch = BatchRewards(["a", "a"], [0, 1], [1.0, 0.0], penalties)
    expected = whiten(np.array([1 - 0.1 - 0.2, 1 - 0.2, -0.4]))
    np.testing.assert_allclose(found("reinforce_pp", batch), expected, rtol=1e-12)


def test_the_sequences_of_an_attempt_are_one_trajectory() -> None:
    """The same tokens cut in two (by a compaction of the context) have the same advantages."""
    config = AlgorithmConfig(critic=CriticConfig(discount=0.9, trace_decay=0.8))
    rng = np.random.default_rng(1)
    penalties, values, other = rng.normal(size=5), rng.normal(size=5), rng.normal(size=3)
    zeros = np.zeros(3)
    whole = BatchRewards(["a", "a"], [0, 1], [1.0, 0.0], [penalties, zeros], [values, other])
    cut = BatchRewards(
        ["a", "a", "a"],
        [0, 1, 0],
        [1.0, 0.0, 1.0],
        [penalties[:2], zeros, penalties[2:]],
        [values[:2], other, values[2:]],
    )
    # Tokens 2, 3 and 4 of the first attempt come after the second attempt's three.
    order = [0, 1, 5, 6, 7, 2, 3, 4]
    for name in ("gae", "reinforce_pp"):
        ours = found(name, cut, config)[order]
        np.testing.assert_allclose(ours, found(name, whole, config), rtol=1e-12)


def test_gae_is_whitened_over_the_batch_and_its_targets_are_not() -> None:
    config = AlgorithmConfig(advantage="gae")
    values = [np.array([0.2, 0.4]), np.array([0.5])]
    batch = BatchRewards(["a", "a"], [0, 1], [1.0, 0.0], [np.zeros(2), np.zeros(1)], values)
    expected = whiten(np.array([1 - 0.2, 1 - 0.4, 0 - 0.5]))
    np.testing.assert_allclose(found("gae", batch, config), expected, rtol=1e-12)
    assert [target.tolist() for target in critic_targets(batch, config)] == [[1.0, 1.0], [0.0]]


def test_gae_without_a_critic_is_refused() -> None:
    batch = BatchRewards(["a"], [0], [1.0], [np.zeros(1)])
    with pytest.raises(ValueError, match="needs a critic's values"):
        found("gae", batch)
