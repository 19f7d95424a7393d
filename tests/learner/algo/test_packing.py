import time

from hypothesis import given
from hypothesis import strategies as st

from flotilla_learner.algo.packing import first_fit_decreasing, make_pack_layout

lengths_lists = st.lists(st.integers(1, 200), max_size=60)


@given(lengths_lists, st.integers(1, 256))
def test_every_sequence_is_in_one_pack_and_no_pack_is_over_budget(
    lengths: list[int], budget: int
) -> None:
    packs = first_fit_decreasing(lengths, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[index] for index in pack) <= budget


@given(lengths_lists, st.integers(200, 400))
def test_at_most_one_pack_is_half_empty(lengths: list[int], budget: int) -> None:
    packs = first_fit_decreasing(lengths, budget)
    fill = sorted(sum(lengths[index] for index in pack) for pack in packs)
    assert all(2 * tokens > budget for tokens in fill[1:])


def test_longest_first_into_the_first_pack_with_room() -> None:
    assert first_fit_decreasing([2, 7, 3, 5, 4], 10) == ((1, 2), (3, 4), (0,))


def test_a_large_batch_is_packed_in_no_time() -> None:
    """A search of all packs for each sequence, one by one in Python, takes over a second."""
    lengths = [600 + 37 * index % 800 for index in range(16384)]
    started = time.process_time()
    assert len(first_fit_decreasing(lengths, 4096)) > 3000
    assert time.process_time() - started < 0.5


def test_position_ids_start_again_in_every_segment() -> None:
    plan = make_pack_layout([2, 3])
    assert plan.offsets == (0, 2, 5)
    assert plan.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert make_pack_layout([]).offsets == (0,)
