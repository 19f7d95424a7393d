"""Histograms of the values behind a step's means."""

from collections.abc import Iterable, Sequence

import numpy as np

from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.types import Histogram

_BINS = 32


def build_histogram(values: Iterable[float], bins: int = _BINS) -> Histogram | None:
    """Count values in equal bins between the smallest and the largest; return None if there are
    none.

    Whole numbers close together get bins of width one. Non-finite values are left out."""
    found = np.fromiter(values, np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return None
    low, high = float(found.min()), float(found.max())
    if np.equal(found, np.round(found)).all() and high - low < bins:
        edges = np.arange(low, high + 2.0)
    else:
        # The greatest value belongs to the last bin, whose upper edge is open.
        edges = np.linspace(low, np.nextafter(high, np.inf) if high > low else low + 1.0, bins + 1)
    counts, _ = np.histogram(found, edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


def step_histograms(groups: Sequence[ReadyGroup], version: int) -> dict[str, Histogram]:
    """Return histograms over the step's graded attempts, including those of filtered groups.

    - reward/distribution: r; judge/distribution: the same of judged attempts
    - environment/turns, environment/policy_tokens: turns and the policy's own tokens
    - environment/episode_seconds: opening, generating, tools and grading
    - async/staleness: `version` minus the oldest version that wrote any of it"""
    records = [record for group in groups for record in group.graded]
    spread = {
        "reward/distribution": build_histogram(_rewards_of(groups, judged=False)),
        "judge/distribution": build_histogram(_rewards_of(groups, judged=True)),
        "environment/turns": build_histogram(r.trajectory.counts.turns for r in records),
        "environment/policy_tokens": build_histogram(r.policy_tokens for r in records),
        "environment/episode_seconds": build_histogram(episode_seconds(r) for r in records),
        "async/staleness": build_histogram(
            version - r.oldest_version for r in records if r.oldest_version is not None
        ),
    }
    return {name: shape for name, shape in spread.items() if shape is not None}


def _rewards_of(groups: Sequence[ReadyGroup], *, judged: bool) -> list[float]:
    return [r for group in groups if group.is_judged == judged for r in group.rewards]


def episode_seconds(record: AttemptRecord) -> float:
    """Return the seconds of opening, generating, tools and grading."""
    counts, turns = record.trajectory.counts, record.trajectory.turns
    return counts.open_s + counts.grade_s + sum(t.generate_s + t.tools_s for t in turns)
