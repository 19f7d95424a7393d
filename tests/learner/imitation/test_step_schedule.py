"""Which sequences each step imitates."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from flotilla_learner.imitation.step_schedule import StepSchedule


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 4))
def test_every_epoch_takes_each_sequence_exactly_once(
    sequences: int, per_step: int, seed: int, epochs: int
) -> None:
    schedule = StepSchedule(sequences, per_step, seed)
    steps = -(-sequences * epochs // per_step)
    row = list(chain.from_iterable(schedule.places_of(step) for step in range(1, steps + 1)))
    assert len(row) == steps * per_step
    for epoch in range(epochs):
        part = row[epoch * sequences : (epoch + 1) * sequences]
        assert sorted(part) == list(range(sequences))
    assert schedule.epochs_after(steps) >= epochs


def test_a_step_follows_from_seed_and_number_alone() -> None:
    schedule = StepSchedule(100, 7, 3)
    asked = {step: schedule.places_of(step) for step in (30, 2, 17, 2, 1)}
    assert asked == {step: StepSchedule(100, 7, 3).places_of(step) for step in asked}
    assert schedule.places_of(1) != StepSchedule(100, 7, 4).places_of(1)


def test_epochs_are_shuffled_each_in_its_own_way() -> None:
    schedule = StepSchedule(64, 64, 0)
    first, second = schedule.places_of(1), schedule.places_of(2)
    assert first != second and first != sorted(first)


def test_the_order_of_a_seed_never_changes_between_versions() -> None:
    # A run that resumes under another Python trains the same steps.
    assert StepSchedule(8, 5, 0).places_of(1) == [7, 2, 1, 4, 5]
    assert StepSchedule(8, 5, 0).places_of(2) == [3, 0, 6, 0, 7]
