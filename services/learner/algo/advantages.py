"""Advantage estimators over groups: how much better an attempt was than its siblings.

Every estimator maps the rewards of one group's graded attempts to their advantages, in float64.
A group that carries no signal (one attempt, or all rewards equal) has advantage exactly 0.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
Estimator = Callable[[Rewards], Rewards]

_STD_FLOOR = 1e-6


def grpo(rewards: Rewards) -> Rewards:
    """(r - mean) / (std + 1e-6), with the sample standard deviation.

    GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + _STD_FLOOR)


def dr_grpo(rewards: Rewards) -> Rewards:
    """r - mean: no division by the standard deviation, which favours the easiest and hardest.

    Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    return rewards - rewards.mean()


def rloo(rewards: Rewards) -> Rewards:
    """r minus the mean of the *other* attempts, an unbiased baseline.

    RLOO, arXiv 2402.14740, section 2.3; equal to n / (n - 1) * (r - mean).
    """
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


ESTIMATORS: Mapping[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def group_advantages(
    group_ids: Sequence[str],
    attempt_indices: Sequence[int],
    rewards: Sequence[float],
    estimator: Estimator,
) -> Rewards:
    """One advantage per sequence, estimated over the distinct attempts of its group id.

    An attempt of several sequences (after a context compaction) counts once in its group.

    Raises ValueError when two sequences of one attempt carry different rewards, or when a
    reward is not finite.
    """
    groups = _rewards_by_attempt(group_ids, attempt_indices, rewards)
    values = {group: _signal(attempts, estimator) for group, attempts in groups.items()}
    keys = zip(group_ids, attempt_indices, strict=True)
    return np.array([values[group][attempt] for group, attempt in keys], np.float64)


def _rewards_by_attempt(
    group_ids: Sequence[str], attempt_indices: Sequence[int], rewards: Sequence[float]
) -> dict[str, dict[int, float]]:
    groups: dict[str, dict[int, float]] = {}
    for group, attempt, reward in zip(group_ids, attempt_indices, rewards, strict=True):
        if not np.isfinite(reward):
            raise ValueError(f"reward of attempt {attempt} of group {group!r} is {reward}")
        known = groups.setdefault(group, {}).setdefault(attempt, reward)
        if known != reward:
            raise ValueError(
                f"attempt {attempt} of group {group!r} has two rewards, {known} and {reward}"
            )
    return groups


def _signal(attempts: Mapping[int, float], estimator: Estimator) -> dict[int, float]:
    rewards = np.array(list(attempts.values()), np.float64)
    # Compared, not computed: the mean of equal floats may differ from them in the last bit.
    if np.all(rewards == rewards[0]):
        return dict.fromkeys(attempts, 0.0)
    return dict(zip(attempts, estimator(rewards).tolist(), strict=True))
