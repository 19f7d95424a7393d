from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_learner.algo.reductions import REDUCTIONS
from tests.learner.algo.support import config, loss_and_slope, sample
from tests.support.examples import examples

NORM = 50


def test_token_mean_weighs_every_token_of_the_batch_alike() -> None:
    assert REDUCTIONS["token_mean"]([3, 1], NORM).tolist() == [0.25, 0.25]


def test_sequence_mean_weighs_every_sequence_alike() -> None:
    assert REDUCTIONS["sequence_mean"]([4, 1], NORM).tolist() == [0.125, 0.5]


def test_token_sum_norm_divides_by_a_constant_and_the_number_of_sequences() -> None:
    weights = REDUCTIONS["sequence_mean_token_sum_norm"]([4, 1], NORM)
    assert weights.tolist() == [0.01, 0.01]


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_weights_add_up_to_one(name: str) -> None:
    lengths = [5, 1, 17]
    assert np.dot(REDUCTIONS[name](lengths, NORM), lengths) == pytest.approx(1.0)


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_a_sequence_without_tokens_is_none(name: str) -> None:
    with_empty = REDUCTIONS[name]([4, 0, 1], NORM)
    np.testing.assert_array_equal(with_empty[[0, 2]], REDUCTIONS[name]([4, 1], NORM))
    assert np.isfinite(REDUCTIONS[name]([0, 0], NORM)).all()


OBJECTIVES = {
    "ppo_clip with KL": {"kl": {"coefficient": 0.1}},
    "gspo": {"loss": "gspo"},
    "every correction": {
        "proximal": "trainer",
        "correction": {
            "sequence_tis": 1.5,
            "token_mask": [0.5, 2.0],
            "sequence_mask_product": [0.05, 20.0],
            "sequence_mask_geometric": [0.7, 1.4],
            "staleness_decay": 0.9,
        },
    },
    "decoupled over mini-batches": {
        "proximal": "trainer",
        "mini_batches": 2,
        "correction": {"token_tis": 1.5, "sequence_mask_product": [0.05, 20.0]},
    },
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Policy tokens of each sequence, and a partition of the sequences in any order."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    cuts = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    packs: list[list[int]] = [[]]
    for place, cut in zip(order, cuts, strict=True):
        if cut and packs[-1]:
            packs.append([])
        packs[-1].append(place)
    return lengths, packs


@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
@pytest.mark.parametrize("objective", OBJECTIVES)
# No deadline for an example: others may keep the cores busy.
@settings(max_examples=examples(25), deadline=None)
@given(cut=batches(), seed=st.integers(0, 1000))
def test_micro_batches_packs_and_ranks_never_change_loss_or_gradient(
    reduction: str, objective: str, cut: tuple[list[int], Sequence[Sequence[int]]], seed: int
) -> None:
    """Packs of one rank and packs of several add up alike: to the loss of the whole batch."""
    lengths, packs = cut
    drawn = sample(lengths, seed=seed)
    weights = REDUCTIONS[reduction](lengths, NORM).tolist()
    chosen = config(**OBJECTIVES[objective])
    whole = loss_and_slope(drawn, chosen, weights, [range(len(lengths))])
    parts = loss_and_slope(drawn, chosen, weights, packs)
    assert parts[0] == pytest.approx(whole[0], rel=0, abs=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=0, atol=1e-12)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_token_mean_is_the_mean_over_the_tokens_of_the_whole_batch(lengths: list[int]) -> None:
    drawn = sample(lengths)
    weights = REDUCTIONS["token_mean"](lengths, NORM).tolist()
    total, _ = loss_and_slope(
        drawn, config(loss="importance_sampling"), weights, [[i] for i in range(len(lengths))]
    )
    ratio = (drawn.logprobs - drawn.behaviour).exp()
    assert total == pytest.approx(float(-(ratio * drawn.advantages).mean()), abs=1e-12)
