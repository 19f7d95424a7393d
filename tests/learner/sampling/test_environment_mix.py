"""The mixture of environments, window by window."""

from collections import Counter
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_learner.sampling.environment_mix import EnvironmentMix, MixtureError
from tests.support.curriculum import config
from tests.support.examples import examples

SIZES = {"a": 700, "b": 200, "c": 100, "d": 1}


def mixture(window: int, **values: object) -> EnvironmentMix:
    return EnvironmentMix(SIZES, config(**values), window=window, seed=0)


def totals(mixed: EnvironmentMix, windows: int) -> Counter[str]:
    return Counter(env for number in range(windows) for env in mixed.window_order(number))


def test_by_default_environments_take_turns() -> None:
    assert mixture(8).window_order(5) == ["a", "b", "c", "d"] * 2


def test_windows_smaller_than_the_number_of_environments_give_each_its_turn() -> None:
    assert all(29 <= drawn <= 31 for drawn in totals(mixture(3), 40).values())


@pytest.mark.parametrize(
    ("values", "shares"),
    [
        ({"mixing": "uniform"}, {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}),
        ({"mixing": "proportional"}, {e: n / 1001 for e, n in SIZES.items()}),
        (
            {"mixing": "weights", "weights": {"a": 1.0, "b": 2.0, "c": 5.0, "d": 0.0}},
            {"a": 0.125, "b": 0.25, "c": 0.625, "d": 0.0},
        ),
    ],
)
@pytest.mark.parametrize("window", [1, 3, 10, 64])
def test_shares_converge_to_the_weights(
    window: int, values: dict[str, object], shares: dict[str, float]
) -> None:
    for windows in (10, 100, 1000):
        drawn = totals(mixture(window, **values), windows)
        for env, share in shares.items():
            assert abs(drawn[env] - share * window * windows) <= 2 + log2(windows)


@settings(max_examples=examples(200), deadline=None)
@given(
    sizes=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5000), min_size=1),
    least=st.integers(0, 3),
    spare=st.integers(0, 40),
    mixing=st.sampled_from(["uniform", "proportional"]),
    seed=st.integers(0, 9),
    first=st.integers(0, 10**6),
)
def test_every_window_is_full_and_has_the_minimum_of_every_environment(
    sizes: dict[str, int], least: int, spare: int, mixing: str, seed: int, first: int
) -> None:
    window = max(1, least * len(sizes) + spare)
    sampling = config(mixing=mixing, min_per_env=least)
    mixed = EnvironmentMix(sizes, sampling, window=window, seed=seed)
    assert sum(mixed.rates.values()) == pytest.approx(window)
    for number in range(first, first + 20):
        counts = Counter(mixed.window_order(number))
        assert counts.total() == window
        assert all(counts[env] >= least for env in sizes)


def test_beyond_the_minimum_the_others_share_by_weight() -> None:
    mixed = mixture(20, mixing="proportional", min_per_env=2)
    assert mixed.rates["d"] == 2
    assert mixed.rates["c"] == 2
    assert mixed.rates["a"] / mixed.rates["b"] == pytest.approx(3.5)


def test_a_minimum_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MixtureError, match=r"min_per_env is 3.*4 environments.*groups_per_step, 8"):
        mixture(8, min_per_env=3)


def test_weights_name_the_environments_of_the_task_file_and_no_others() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    with pytest.raises(MixtureError, match="lacks d; 0 leaves an environment out"):
        mixture(8, mixing="weights", weights=weights)
    with pytest.raises(MixtureError, match=r"names e, but learner\.tasks has only a"):
        mixture(8, mixing="weights", weights={**weights, "d": 1.0, "e": 1.0})


def test_a_weight_of_nothing_is_overruled_by_the_minimum() -> None:
    weights = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}
    drawn = totals(mixture(8, mixing="weights", weights=weights, min_per_env=1), 10)
    assert drawn == {"a": 50, "b": 10, "c": 10, "d": 10}
