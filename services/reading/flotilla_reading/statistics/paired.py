"""Paired comparison of two sets of attempts on the same tasks. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from flotilla_common.domain.task_means import wilson_interval

# The most changes of signs that are tried: all there are, or else random ones.
_RESAMPLES = 9_999
# Differences, of all changes that are tried together: they are in memory several times.
_MOST_VALUES = 1_000_000
_SEED = 0
# A difference is found if a two-sided test at 5 % finds it in 80 % of all cases.
_SIGNIFICANCE, _POWER = 0.05, 0.8
_MOST_TASKS = 1_000_000
# With fewer, even if all gain, p is above the significance: 2 of 2^5 changes of signs.
_LEAST_TASKS = 6
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """The second of two sets of attempts against the first, over their common tasks.

    `difference` is the mean over tasks of (the task's mean of the second minus that of the first),
    with its 95 % interval; `won` counts tasks where the second's mean is higher. `p` is the
    two-sided p value of no difference; `spread` is the standard deviation of the differences, None
    for one task."""

    tasks: int
    difference: float
    low: float
    high: float
    won: int
    lost: int
    tied: int
    p: float
    spread: float | None

    def tasks_to_show(self, difference: float) -> int | None:
        """Return how many such tasks show a difference, see `tasks_needed`; None if its spread is
        unknown, as that of tasks that all differ by the same."""
        if self.spread is None or self.spread < _TIE:
            return None
        return tasks_needed(difference, self.spread)


def compare_paired(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]
) -> PairedComparison:
    """Compare rewards by task; a task without rewards in both is left out. Raises ValueError if
    there is no common task."""
    common = sorted(key for key in first if first[key] and second.get(key))
    if not common:
        raise ValueError("no task has graded attempts in both")
    differences = [fmean(second[key]) - fmean(first[key]) for key in common]
    won = sum(each > _TIE for each in differences)
    lost = sum(each < -_TIE for each in differences)
    low, high = difference_interval(differences)
    # No mean differs by more than rewards do, which are from 0 to 1 if no verifier says otherwise.
    rewards = [reward for key in common for each in (first, second) for reward in each[key]]
    most = max(1.0, max(rewards) - min(rewards))
    return PairedComparison(
        tasks=len(common),
        difference=fmean(differences),
        low=max(low, -most),
        high=min(high, most),
        won=won,
        lost=lost,
        tied=len(common) - won - lost,
        p=sign_change_p(differences),
        spread=stdev(differences) if len(common) > 1 else None,
    )


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of tasks' differences, for tasks of this kind.

    That of the paired t test. Tasks that are all equal, as when all are tied, have no variance from
    which it could be told: then it is as wide as Wilson's for so many tasks without a pass. Of few
    tasks it holds 0, since no change of their signs has p below 0.05: those that were not drawn may
    all lose as much, and are at most the share of Clopper and Pearson (1934)."""
    from scipy.stats import t

    count, mean = len(differences), fmean(differences)
    spread = stdev(differences) if count > 1 else 0.0
    if spread < _TIE:
        half = wilson_interval(0.0, count)[1]
    else:
        half = float(t.ppf(1 - _SIGNIFICANCE / 2, count - 1)) * spread / count**0.5
    if count < _LEAST_TASKS:
        half = max(half, 2 * abs(mean) * (1 - (_SIGNIFICANCE / 2) ** (1 / count)))
    return mean - half, mean + half


def sign_change_p(differences: Sequence[float]) -> float:
    """Return the two-sided p value that paired differences have mean 0: their signs are changed, in
    all ways if these are at most 9,999, else in so many random ones, always the same.

    If the two sides do not differ, each sign is as likely as its opposite, whatever the sizes are;
    so the test is exact (Fisher 1935; for random changes Phipson and Smyth 2010)."""
    from scipy.stats import permutation_test

    changed = [each for each in differences if abs(each) > _TIE]
    if len(changed) < 2:
        # scipy needs two; the signs of one are both as far from 0.
        return 1.0

    def mean(values: Any, axis: int) -> Any:
        return values.mean(axis=axis)

    found = permutation_test(
        (changed,),
        mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=min(1000, max(1, _MOST_VALUES // len(changed))),
        rng=_SEED,
    )
    return float(found.pvalue)


def tasks_needed(difference: float, spread: float) -> int | None:
    """Return the least number of tasks with which a paired t test finds a difference in 80 % of all
    cases, for differences of a task with this standard deviation; None if a million are too few.

    The test's power is that of the noncentral t distribution (Cohen 1988)."""
    from scipy.stats import nct, t

    def power(tasks: int) -> float:
        limit = t.ppf(1 - _SIGNIFICANCE / 2, tasks - 1)
        return float(nct.sf(limit, tasks - 1, abs(difference) / spread * tasks**0.5))

    if not difference or power(_MOST_TASKS) < _POWER:
        return None
    return 2 + bisect_left(range(2, _MOST_TASKS), _POWER, key=power)
