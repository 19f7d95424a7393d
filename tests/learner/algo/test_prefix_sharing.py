import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flotilla_learner.algo.packing import first_fit_decreasing
from flotilla_learner.algo.prefix_sharing import (
    LEAST_PREFIX,
    PrefixCluster,
    Prompted,
    cluster_by_prefix,
    split_for_ranks,
)

# Pieces of which prompts are put together, so that some begin alike and some do not.
PIECES = [np.full(length, token, np.int32) for token, length in ((1, 9), (2, 5), (3, 20))]


@st.composite
def batches(draw: st.DrawFn) -> list[Prompted]:
    found: list[Prompted] = []
    for _ in range(draw(st.integers(0, 20))):
        chosen = draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4))
        prompt = np.concatenate(chosen)
        answer = np.full(draw(st.integers(1, 30)), 7, np.int32)
        found.append(Prompted(np.concatenate([prompt, answer]), len(prompt)))
    return found


def group_of(size: int, prompt: int, answer: int, *, token: int = 1) -> list[Prompted]:
    shared = np.full(prompt, token, np.int32)
    ends = [np.full(answer, 100 + attempt, np.int32) for attempt in range(size)]
    return [Prompted(np.concatenate([shared, end]), prompt) for end in ends]


def lengths_of(sequences: list[Prompted]) -> list[int]:
    return [len(sequence.token_ids) for sequence in sequences]


def largest_load(clusters: list[PrefixCluster], ranks: int) -> int:
    loads = [0] * ranks
    for tokens in sorted((cluster.tokens for cluster in clusters), reverse=True):
        loads[loads.index(min(loads))] += tokens
    return max(loads)


@given(batches(), st.integers(1, 200), st.integers(1, 5))
def test_members_share_what_is_computed_once_and_no_sequence_is_lost(
    sequences: list[Prompted], budget: int, ranks: int
) -> None:
    lengths = lengths_of(sequences)
    whole = cluster_by_prefix(sequences, budget)
    for clusters in (whole, split_for_ranks(whole, lengths, ranks)):
        members = [index for cluster in clusters for index in cluster.members]
        assert sorted(members) == list(range(len(sequences)))
        for cluster in clusters:
            shared = {
                sequences[index].token_ids[: cluster.prefix].tobytes() for index in cluster.members
            }
            assert len(shared) == 1
            assert all(cluster.prefix <= sequences[i].prompt for i in cluster.members)
            assert cluster.prefix == 0 or cluster.prefix >= LEAST_PREFIX
            assert (cluster.prefix == 0) == (len(cluster.members) == 1)
            own = sum(lengths[index] - cluster.prefix for index in cluster.members)
            assert cluster.tokens == cluster.prefix + own
            assert cluster.tokens <= budget or len(cluster.members) == 1


@given(batches(), st.integers(1, 200), st.integers(1, 5))
def test_sharing_computes_no_more_and_no_rank_gets_more_than_before_the_split(
    sequences: list[Prompted], budget: int, ranks: int
) -> None:
    clusters = cluster_by_prefix(sequences, budget)
    lengths = lengths_of(sequences)
    assert sum(cluster.tokens for cluster in clusters) <= sum(lengths)
    split = split_for_ranks(clusters, lengths, ranks)
    assert largest_load(split, ranks) <= largest_load(clusters, ranks)


def test_a_groups_prompt_is_computed_once() -> None:
    (cluster,) = cluster_by_prefix(group_of(8, 80, 20), 4096)
    assert cluster == PrefixCluster(tuple(range(8)), 80, 80 + 8 * 20)


def test_groups_whose_prompts_begin_alike_share_each_the_longer_part() -> None:
    tools = np.arange(40, dtype=np.int32)
    sequences = [
        Prompted(np.concatenate([tools, own.token_ids]), 40 + own.prompt)
        for token in (1, 2)
        for own in group_of(4, 60, 10, token=token)
    ]
    found = cluster_by_prefix(sequences, 4096)
    assert [(cluster.members, cluster.prefix) for cluster in found] == [
        ((0, 1, 2, 3), 100),
        ((4, 5, 6, 7), 100),
    ]


def test_a_short_part_in_common_spoils_no_long_one() -> None:
    long, short = group_of(6, 90, 10), group_of(3, 12, 10)
    found = cluster_by_prefix([*long, *short], 4096)
    assert sorted((len(c.members), c.prefix) for c in found) == [(3, 12), (6, 90)]


def test_a_group_over_the_budget_computes_its_prompt_once_in_each_pack() -> None:
    sequences = group_of(8, 80, 20)
    found = cluster_by_prefix(sequences, 160)
    assert [(len(cluster.members), cluster.tokens) for cluster in found] == [(4, 160), (4, 160)]
    # Where not even two fit, each is computed as if there were no other.
    alone = cluster_by_prefix(sequences, 100)
    assert [(cluster.prefix, cluster.tokens) for cluster in alone] == [(0, 100)] * 8


def test_one_group_is_split_where_further_ranks_would_have_nothing_to_do() -> None:
    sequences = group_of(8, 80, 20)
    lengths = lengths_of(sequences)
    whole = cluster_by_prefix(sequences, 4096)
    for ranks, largest in ((1, 240), (2, 160), (4, 120), (8, 100)):
        split = split_for_ranks(whole, lengths, ranks)
        assert max(cluster.tokens for cluster in split) == largest
    # With as many groups as ranks each stays together.
    many = [*sequences, *group_of(8, 80, 20, token=2)]
    kept = split_for_ranks(cluster_by_prefix(many, 4096), lengths_of(many), 2)
    assert [len(cluster.members) for cluster in kept] == [8, 8]


def test_without_prompts_in_common_packs_are_what_they_were() -> None:
    rng = np.random.default_rng(0)
    sequences = [
        Prompted(rng.integers(0, 1000, length).astype(np.int32), length // 2)
        for length in (5, 70, 33, 12)
    ]
    clusters = split_for_ranks(cluster_by_prefix(sequences, 64), lengths_of(sequences), 3)
    assert [cluster.members for cluster in clusters] == [(0,), (1,), (2,), (3,)]
    packs = first_fit_decreasing([cluster.tokens for cluster in clusters], 64)
    assert packs == first_fit_decreasing(lengths_of(sequences), 64)


def test_a_large_batch_is_clustered_in_no_time() -> None:
    sequences = [own for token in range(256) for own in group_of(16, 500, 100, token=token)]
    started = time.process_time()
    assert len(cluster_by_prefix(sequences, 16384)) == 256
    assert time.process_time() - started < 2
