"""Prefix sharing: sequences that start with the same prompt compute it once per pack.

Clusters depend only on the sequences' tokens, so that every rank plans the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.algo.packing import first_fit_decreasing, spread_evenly

# A shorter prompt saves less than the extra attention calls cost.
LEAST_PREFIX = 8
# Sharing a prompt among more sequences saves almost nothing; this bounds the search for clusters.
_MOST_MEMBERS = 256
# Largest cluster sizes to try, as shares of a rank's fair load.
_SHARES = (1.0, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class Prompted:
    """A sequence and the length of its prompt: the tokens before the policy's first."""

    # Or any other values that are equal exactly where the computation is.
    token_ids: NDArray[np.integer[Any]]
    prompt: int


@dataclass(frozen=True, slots=True)
class PrefixCluster:
    """Sequences whose first `prefix` tokens are computed once; 0 for a single sequence."""

    # Indices of the sequences, ascending.
    members: tuple[int, ...]
    prefix: int
    # Tokens to compute: the prefix, and the rest of each member.
    tokens: int


def cluster_by_prefix(sequences: Sequence[Prompted], budget: int) -> list[PrefixCluster]:
    """Cluster sequences so that packs of at most `budget` tokens compute as few as possible.

    A cluster exceeds the budget only if it is a single sequence that does. A pure function."""
    prompts = [sequence.token_ids[: sequence.prompt] for sequence in sequences]
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].tobytes(), i))
    # In this order, the overlap of a run's first and last sequence is shared by all of it.
    overlaps = [_overlap(prompts[a], prompts[b]) for a, b in pairwise(order)]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    if max(overlaps, default=0) < LEAST_PREFIX:
        return [_alone(index, lengths) for index in range(len(lengths))]
    found: list[PrefixCluster] = []
    for start, end in _partition([lengths[i] for i in order], overlaps, budget):
        prefix = min(overlaps[start : end - 1], default=0)
        found += _fit_budget(order[start:end], lengths, prefix, budget)
    return sorted(found, key=lambda cluster: cluster.members)


def split_for_ranks(
    clusters: Sequence[PrefixCluster], lengths: Sequence[int], ranks: int
) -> list[PrefixCluster]:
    """Split clusters where that gives the rank with the most tokens fewer of them.

    `lengths` covers all sequences. A split computes a prefix once more."""
    best = list(clusters)
    if ranks == 1 or all(len(cluster.members) == 1 for cluster in clusters):
        return best
    fair = sum(cluster.tokens for cluster in clusters) / ranks
    for share in _SHARES:
        tried = [
            part
            for cluster in clusters
            for part in _split_evenly(cluster, lengths, ceil(cluster.tokens / (share * fair)))
        ]
        if _largest_load(tried, ranks) < _largest_load(best, ranks):
            best = tried
    return best


def _overlap(one: NDArray[np.integer[Any]], other: NDArray[np.integer[Any]]) -> int:
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _partition(
    lengths: Sequence[int], overlaps: Sequence[int], budget: int
) -> Iterator[tuple[int, int]]:
    """Yield runs [start, end) of neighbours that together compute the fewest tokens."""
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    fewest = np.zeros(len(lengths) + 1)
    starts = np.zeros(len(lengths) + 1, np.int64)
    # For runs starting at each place, the prefix that their members share so far.
    shared = np.full(len(lengths), np.iinfo(np.int64).max)
    for end in range(1, len(lengths) + 1):
        first = max(0, end - _MOST_MEMBERS)
        if end > 1:
            np.minimum(shared[: end - 1], overlaps[end - 2], out=shared[: end - 1])
        totals = fewest[first:end] + _run_tokens(ends, shared, first, end, budget)
        # Among equals, the shortest run.
        starts[end] = end - 1 - int(totals[::-1].argmin())
        fewest[end] = totals[starts[end] - first]
    found: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        found.append((int(starts[end]), end))
        end = int(starts[end])
    yield from reversed(found)


def _run_tokens(
    ends: NDArray[np.int64], shared: NDArray[np.int64], first: int, end: int, budget: int
) -> NDArray[np.float64]:
    """Return the tokens that runs [start, end) compute, for every start from `first` on."""
    own = (ends[end] - ends[first:end]).astype(np.float64)
    members = end - np.arange(first, end)
    useful = (shared[first:end] >= LEAST_PREFIX) & (shared[first:end] < budget) & (members > 1)
    prefix = np.where(useful, shared[first:end], 0)
    rest = own - members * prefix
    return np.where(useful, rest + np.ceil(rest / np.maximum(budget - prefix, 1)) * prefix, own)


def _fit_budget(
    members: Sequence[int], lengths: Sequence[int], prefix: int, budget: int
) -> Iterator[PrefixCluster]:
    """Yield clusters that compute at most `budget` tokens each."""
    if not LEAST_PREFIX <= prefix < budget:
        yield from (_alone(index, lengths) for index in members)
        return
    suffixes = [lengths[index] - prefix for index in members]
    for places in first_fit_decreasing(suffixes, budget - prefix):
        yield _make_cluster([members[place] for place in places], lengths, prefix)


def _split_evenly(
    cluster: PrefixCluster, lengths: Sequence[int], parts: int
) -> Iterator[PrefixCluster]:
    suffixes = [lengths[index] - cluster.prefix for index in cluster.members]
    for places in spread_evenly(suffixes, min(parts, len(suffixes))):
        members = [cluster.members[place] for place in places]
        yield _make_cluster(members, lengths, cluster.prefix)


def _largest_load(clusters: Sequence[PrefixCluster], ranks: int) -> int:
    tokens = [cluster.tokens for cluster in clusters]
    return max(sum(tokens[i] for i in share) for share in spread_evenly(tokens, ranks))


def _make_cluster(members: Sequence[int], lengths: Sequence[int], prefix: int) -> PrefixCluster:
    if len(members) == 1:
        return _alone(members[0], lengths)
    tokens = prefix + sum(lengths[index] - prefix for index in members)
    return PrefixCluster(tuple(sorted(members)), prefix, tokens)


def _alone(index: int, lengths: Sequence[int]) -> PrefixCluster:
    return PrefixCluster((index,), 0, lengths[index])
