"""Numbers of tasks are exact, and shares hold of what is finally left."""

import hashlib
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_reading.data.entries import DataError
from flotilla_reading.data.split import SplitRules, count_eval_tasks, find_cap, order_of
from tests.reading.data.made_tasks import SIZES
from tests.support.examples import examples

# How far a share is from the least that is possible, 0, to 1.
ABOVE_LEAST = st.fractions(0, 1, max_denominator=20)
RULES = st.builds(
    SplitRules,
    ratio=st.fractions(0, 1, max_denominator=20),
    least=st.integers(1, 6),
    most=st.integers(0, 20),
    max_eval=st.none() | st.integers(0, 60),
    held_out=st.sampled_from([(), ("shop",), ("desk", "mail")]),
)


@pytest.mark.parametrize(
    ("tasks", "count"), [(0, 0), (49, 0), (50, 5), (59, 5), (60, 6), (200, 20), (10_000, 20)]
)
def test_an_environment_is_evaluated_on_its_share_within_a_minimum_and_a_maximum(
    tasks: int, count: int
) -> None:
    assert SplitRules().count_for(tasks) == count


def test_a_ratio_is_exact_where_a_float_is_not() -> None:
    assert int(100 * 0.29) == 28
    assert SplitRules(ratio=Fraction("0.29"), most=1000).count_for(100) == 29


def reference_hash(key: str) -> float:
    """Place of a key in Fleet's `prepare_dataset`: the first 8 bytes of its MD5, as a share."""
    return int.from_bytes(hashlib.md5(key.encode()).digest()[:8]) / 2**64


@given(st.integers(25, 300), st.text("abc", max_size=3))
@settings(max_examples=examples(100), deadline=None)
def test_what_fleet_evaluates_on_comes_first_here_too(tasks: int, prefix: str) -> None:
    """Fleet takes all keys whose hash is below a threshold, so their number is a matter of luck;
    here it is exact, and the smaller of both sets is a part of the other."""
    rules = SplitRules(ratio=Fraction(1, 5), least=5, most=20)
    keys = [f"{prefix}-{n}" for n in range(tasks)]
    target = min(int(tasks * 0.2), 20)
    theirs = {key for key in keys if reference_hash(key) < target / tasks}
    ours = set(sorted(keys, key=order_of)[: rules.count_for(tasks)])
    assert len(ours) == target
    assert ours <= theirs or theirs <= ours


@given(SIZES, RULES)
@settings(max_examples=examples(300), deadline=None)
def test_a_sum_over_the_limit_is_exactly_the_limit_and_shared_evenly(
    sizes: dict[str, int], rules: SplitRules
) -> None:
    counts = count_eval_tasks(sizes, rules)
    wanted = {
        env: size if env in rules.held_out else rules.count_for(size) for env, size in sizes.items()
    }
    most = sum(wanted.values()) if rules.max_eval is None else rules.max_eval
    assert sum(counts.values()) == min(sum(wanted.values()), most)
    assert all(counts[env] <= wanted[env] for env in sizes)
    # Who gets less than it wants has as much as any other, up to one.
    short = [counts[env] for env in sizes if counts[env] < wanted[env]]
    assert not short or min(short) >= max(counts.values()) - 1


def share_of(sizes: dict[str, int], above_least: Fraction) -> Fraction:
    least = Fraction(1, sum(size > 0 for size in sizes.values()) or 1)
    return least + (1 - least) * above_least


@given(SIZES, ABOVE_LEAST)
@settings(max_examples=examples(300), deadline=None)
def test_no_environment_has_more_than_its_share_of_what_is_left(
    sizes: dict[str, int], above_least: Fraction
) -> None:
    share = share_of(sizes, above_least)
    cap = find_cap(sizes, share)
    left = [min(size, cap) for size in sizes.values()]
    assert cap >= 1 or not any(sizes.values())
    assert max(left) <= share * sum(left)
    # And one more would be too many, or there is no more.
    more = [min(size, cap + 1) for size in sizes.values()]
    assert more == left or max(more) > share * sum(more)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), ABOVE_LEAST)
@settings(max_examples=examples(100), deadline=None)
def test_no_other_choice_leaves_more_tasks(counts: list[int], above_least: Fraction) -> None:
    sizes = {str(n): count for n, count in enumerate(counts)}
    share = share_of(sizes, above_least)
    cap = find_cap(sizes, share)
    choices: list[list[int]] = [[]]
    for count in counts:
        choices = [[*chosen, n] for chosen in choices for n in range(count + 1)]
    fitting = [sum(chosen) for chosen in choices if max(chosen) <= share * sum(chosen)]
    assert sum(min(count, cap) for count in counts) == max(fitting)


def test_a_share_of_the_sum_before_the_cap_would_be_exceeded_after_it() -> None:
    sizes = {"maps": 6000, **{f"app{n}": 500 for n in range(8)}}
    cap = find_cap(sizes, Fraction("0.2"))
    assert cap == 1000
    assert 2000 / (2000 + 8 * 500) > 0.2


def test_a_share_that_no_choice_has_is_refused_with_the_least_that_one_has() -> None:
    with pytest.raises(DataError, match="of 3 environments to train on, one has at least 1/3"):
        find_cap({"a": 5, "b": 7, "c": 1, "none": 0}, Fraction("0.2"))
    assert find_cap({"only": 4}, Fraction(1)) == 4
    assert find_cap({"none": 0}, Fraction("0.2")) == 0
