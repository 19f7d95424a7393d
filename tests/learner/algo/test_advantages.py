from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_learner.algo.advantages import (
    ADVANTAGES,
    BatchRewards,
    dr_grpo,
    grpo,
    max_rl,
    rloo,
)
from flotilla_learner.algo.gae import TokenValues
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.types import TurnTokens

CONFIG = AlgorithmConfig()
ESTIMATORS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "max_rl": max_rl}


def batch(
    rewards: Sequence[float],
    *,
    groups: Sequence[str] | None = None,
    attempts: Sequence[int] | None = None,
    token_rewards: Sequence[TokenValues] | None = None,
) -> BatchRewards:
    """One group of one-token sequences, each an attempt, unless given otherwise."""
    return BatchRewards(
        groups or ["g"] * len(rewards),
        attempts or range(len(rewards)),
        rewards,
        token_rewards or [np.zeros(1)] * len(rewards),
    )


def estimate(name: str, given: BatchRewards) -> list[list[float]]:
    return [values.tolist() for values in ADVANTAGES.get(name)(given, CONFIG)]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("rewards", [(1e6, -1e6), (1e6, 1e6, 1e6, -1e6), (1e6, 0.0, 1e-300)])
def test_rewards_at_the_bounds_of_what_is_taken_in_have_finite_advantages(
    name: str, rewards: tuple[float, ...]
) -> None:
    advantages = np.array(estimate(name, batch(rewards)), dtype=np.float32)
    assert np.isfinite(advantages).all() and np.isfinite(advantages**2).all()


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


def test_max_rl_weighs_a_task_by_the_inverse_of_its_pass_rate() -> None:
    np.testing.assert_allclose(max_rl(np.array([1.0, 0.0, 0.0, 0.0])), [3.0, -1.0, -1.0, -1.0])
    np.testing.assert_allclose(max_rl(np.array([1.0, 1.0, 1.0, 0.0])), [1 / 3] * 3 + [-1.0])


@pytest.mark.parametrize("rewards", [[-1.0, 0.0], [-1.0, 1.0], [-0.5, -0.25]])
def test_max_rl_without_a_positive_mean_has_nothing_to_divide_by(rewards: list[float]) -> None:
    assert max_rl(np.array(rewards)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", [*sorted(ESTIMATORS), "opo", "mt_grpo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_groups_without_a_signal_are_exactly_zero(name: str, rewards: list[float]) -> None:
    assert estimate(name, batch(rewards)) == [[0.0]] * len(rewards)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_group_sees_exactly_its_own_members_in_any_order(name: str) -> None:
    mixed = batch([1.0, 0.5, 0.0, 0.0, 0.25], groups=["a", "b", "a", "b", "a"])
    found = np.concatenate(ADVANTAGES.get(name)(mixed, CONFIG))
    alone = ESTIMATORS[name](np.array([1.0, 0.0, 0.25]))
    np.testing.assert_array_equal(found[[0, 2, 4]], alone)
    np.testing.assert_array_equal(found[[1, 3]], ESTIMATORS[name](np.array([0.5, 0.0])))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        min_size=1,
        max_size=20,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from(
        [
            *("dr_grpo", "rloo", "grpo", "max_rl", "opo", "mt_grpo"),
            *("reinforce_pp", "reinforce_pp_baseline"),
        ]
    ),
)
def test_the_order_of_the_batch_does_not_matter(
    members: list[tuple[str, float]], random: np.random.Generator, name: str
) -> None:
    def found(order: Sequence[int]) -> list[float]:
        shuffled = batch(
            [members[i][1] for i in order],
            groups=[members[i][0] for i in order],
            attempts=list(order),
        )
        values = np.concatenate(ADVANTAGES.get(name)(shuffled, CONFIG))
        return values[np.argsort(order)].tolist()

    order = list(range(len(members)))
    straight = found(order)
    random.shuffle(order)
    assert found(order) == pytest.approx(straight, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_token_gets_its_attempts_advantage(name: str) -> None:
    tokens = [np.zeros(3), np.zeros(0), np.zeros(1)]
    found = estimate(name, batch([1.0, 0.5, 0.0], token_rewards=tokens))
    expected = ESTIMATORS[name](np.array([1.0, 0.5, 0.0])).tolist()
    assert found == [[expected[0]] * 3, [], [expected[2]]]


def test_opo_compares_with_the_mean_weighted_by_all_tokens_of_an_attempt() -> None:
    # Attempt 0 has 3 tokens in two sequences, attempt 1 one token, and attempt 2 none.
    tokens = [np.zeros(1), np.zeros(2), np.zeros(1), np.zeros(0)]
    given = batch([1.0, 1.0, 0.0, 0.5], attempts=[0, 0, 1, 2], token_rewards=tokens)
    assert estimate("opo", given) == [[0.25], [0.25, 0.25], [-0.75], []]


def test_opo_weighs_a_groups_gradient_by_token_to_zero() -> None:
    tokens = [np.zeros(length) for length in (5, 1, 8, 2)]
    found = np.concatenate(estimate("opo", batch([1.0, 0.3, -0.5, 0.9], token_rewards=tokens)))
    assert found.sum() == pytest.approx(0.0, abs=1e-12)


def test_opo_of_attempts_without_a_token_divides_by_nothing() -> None:
    assert estimate("opo", batch([1.0, 0.0], token_rewards=[np.zeros(0)] * 2)) == [[], []]


def turns_of(*rewards: float | None, tokens: int = 2) -> tuple[TurnTokens, ...]:
    return tuple(TurnTokens(turn, tokens, reward) for turn, reward in enumerate(rewards))


def test_mt_grpo_adds_the_advantage_of_a_turns_reward_in_that_turn() -> None:
    """Three attempts of two turns, of which the first is rewarded, as in the paper."""
    outcomes, first = np.array([1.0, 0.0, 0.0]), np.array([0.5, 1.0, 0.0])
    given = replace(
        batch(outcomes.tolist(), token_rewards=[np.zeros(4)] * 3),
        turns=[turns_of(reward, None) for reward in first],
    )
    config = AlgorithmConfig(turn_coefficient=0.5)
    found = np.stack(ADVANTAGES.get("mt_grpo")(given, config))
    np.testing.assert_allclose(found[:, 2:], np.stack([grpo(outcomes)] * 2, 1), rtol=1e-12)
    expected = grpo(outcomes) + 0.5 * grpo(first)
    np.testing.assert_allclose(found[:, :2], np.stack([expected] * 2, 1), rtol=1e-12)


def test_mt_grpo_compares_a_turn_with_the_same_turn_of_its_group_alone() -> None:
    given = replace(
        batch([1.0, 1.0, 1.0, 1.0], groups=["a", "a", "b", "b"], token_rewards=[np.zeros(4)] * 4),
        turns=[turns_of(0, 3), turns_of(2, 3), turns_of(9, 1), turns_of(9, 0)],
    )
    up, down = grpo(np.array([1.0, 0.0]))
    assert estimate("mt_grpo", given) == [
        [pytest.approx(down, rel=1e-5)] * 2 + [0.0] * 2,
        [pytest.approx(up, rel=1e-5)] * 2 + [0.0] * 2,
        [0.0] * 2 + [up] * 2,
        [0.0] * 2 + [down] * 2,
    ]


def test_a_turn_without_a_reward_is_not_compared_as_if_it_were_0() -> None:
    given = replace(
        batch([1.0, 1.0, 1.0], token_rewards=[np.zeros(2)] * 3),
        turns=[turns_of(1.0), turns_of(None), turns_of(3.0)],
    )
    first, missing, last = estimate("mt_grpo", given)
    assert missing == [0.0, 0.0]
    assert first[0] == -last[0] == pytest.approx(-1 / np.sqrt(2), rel=1e-5)


@pytest.mark.parametrize("turns", [(), ((), ()), (turns_of(1.0), ())])
def test_mt_grpo_is_grpo_where_no_two_turns_can_be_compared(
    turns: Sequence[Sequence[TurnTokens]],
) -> None:
    given = batch([1.0, 0.0], token_rewards=[np.zeros(2)] * 2)
    assert estimate("mt_grpo", replace(given, turns=turns)) == estimate("grpo", given)


def test_the_turns_of_an_attempt_may_lie_in_several_sequences_of_which_one_was_cut() -> None:
    # Turn 1 is in both sequences of attempt 0, of which the second lost its last token.
    given = replace(
        batch([1.0, 1.0, 1.0], attempts=[0, 0, 1], token_rewards=[np.zeros(n) for n in (3, 2, 2)]),
        turns=[
            (TurnTokens(0, 2, None), TurnTokens(1, 1, 5.0)),
            (TurnTokens(1, 1, 5.0), TurnTokens(2, 2, 7.0)),
            (TurnTokens(0, 1, None), TurnTokens(1, 1, 4.0)),
        ],
    )
    up, down = grpo(np.array([5.0, 4.0]))
    assert estimate("mt_grpo", given) == [[0.0, 0.0, up], [up, 0.0], [0.0, down]]


GDPO = AlgorithmConfig(advantage="gdpo", rewards={"correct": 1.0, "style": 0.5})


def named(given: BatchRewards, *rewards: dict[str, float]) -> list[list[float]]:
    """gdpo of a batch with these named rewards."""
    found = ADVANTAGES.get("gdpo")(replace(given, named_rewards=rewards), GDPO)
    return [values.tolist() for values in found]


def test_gdpo_normalises_each_named_reward_by_itself_and_whitens_their_weighted_sum() -> None:
    correct, style = np.array([1.0, 0.0, 0.0]), np.array([0.2, 0.9, 0.1])
    rewards = [{"correct": c, "style": s} for c, s in zip(correct, style, strict=True)]
    # What the attempts' own rewards are plays no role.
    given = batch([7.0, 7.0, 7.0], token_rewards=[np.zeros(n) for n in (1, 2, 3)])
    total = np.repeat(grpo(correct) + 0.5 * grpo(style), [1, 2, 3])
    expected = (total - total.mean()) / np.sqrt(total.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(named(given, *rewards)), expected, rtol=1e-12)


def test_an_attempt_without_a_name_is_not_compared_under_it() -> None:
    """As if the others had been the whole group, and never as if it had earned 0."""
    given = batch([0.0] * 3)
    one, other, without = named(given, {"correct": 1.0}, {"correct": 5.0}, {})
    alone = named(batch([0.0] * 3, groups=["g", "g", "h"]), {"correct": 1.0}, {"correct": 5.0}, {})
    assert [one, other, without] == alone
    assert one[0] < without[0] < other[0]
    assert without[0] == pytest.approx(0.0, abs=1e-12)


def test_gdpo_of_groups_alike_under_every_name_is_exactly_0() -> None:
    rewards = {"correct": 0.1, "style": 0.3}
    assert named(batch([1.0, 0.0]), rewards, rewards) == [[0.0], [0.0]]


def test_a_batch_without_any_of_the_names_is_refused_with_those_it_has() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.rewards \(correct, style\).*: other, that$"):
        named(batch([1.0, 0.0]), {"other": 1.0}, {"that": 1.0})
    with pytest.raises(ValueError, match=r"nothing$"):
        named(batch([1.0, 0.0]), {}, {})


def test_reinforce_pp_with_a_baseline_scales_all_groups_alike() -> None:
    # Differences from the group's mean: +-0.5 and +-0.05, each of one token.
    given = batch([1.0, 0.0, 0.6, 0.5], groups=["wide", "wide", "narrow", "narrow"])
    found = np.concatenate(estimate("reinforce_pp_baseline", given))
    assert found[0] == pytest.approx(10 * found[2], rel=1e-12)
    assert found.std(ddof=1) == pytest.approx(1.0, rel=1e-6)


def test_reinforce_pp_with_a_baseline_whitens_by_token_and_centres_by_attempt() -> None:
    # Of tokens: 0.5 three times, -0.5 once, and 0 four times from a group without a signal.
    tokens = [np.zeros(2), np.zeros(1), np.zeros(1), np.zeros(4)]
    groups, attempts = ["g", "g", "g", "h"], [0, 0, 1, 0]
    given = batch([1.0, 1.0, 0.0, 1.0], groups=groups, attempts=attempts, token_rewards=tokens)
    raw = np.array([0.5] * 3 + [-0.5] + [0.0] * 4)
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    found = np.concatenate(estimate("reinforce_pp_baseline", given))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_two_sequences_of_one_attempt_count_once() -> None:
    given = batch([1.0, 1.0, 0.0], attempts=[0, 0, 1])
    assert estimate("dr_grpo", given) == [[0.5], [0.5], [-0.5]]


def test_a_kl_in_the_reward_is_part_of_an_attempts_outcome() -> None:
    penalties = [np.array([-0.1, -0.1]), np.array([-0.2]), np.zeros(1)]
    given = batch([1.0, 1.0, 0.0], attempts=[0, 0, 1], token_rewards=penalties)
    # Outcomes 1 - 0.1 - 0.1 - 0.2 and 0.
    found = np.concatenate(ADVANTAGES.get("dr_grpo")(given, CONFIG))
    np.testing.assert_allclose(found, [0.3, 0.3, 0.3, -0.3], rtol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_two_rewards_for_one_attempt_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has two rewards"):
        estimate(name, with_values(batch([1.0, 0.0], attempts=[0, 0])))


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_a_reward_that_is_not_finite_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is nan"):
        estimate(name, with_values(batch([float("nan"), 0.0])))


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_a_batch_of_nothing_has_no_advantages(name: str) -> None:
    assert estimate(name, with_values(batch([]))) == []


def with_values(given: BatchRewards) -> BatchRewards:
    values = [np.zeros(len(tokens)) for tokens in given.token_rewards]
    return BatchRewards(
        given.group_ids, given.attempt_indices, given.rewards, given.token_rewards, values
    )
