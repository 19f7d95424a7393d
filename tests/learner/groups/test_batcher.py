"""Groups that a step takes, and groups that it leaves."""

import pytest

from services.common.domain.attempts import AttemptKey, Purpose
from services.common.domain.trajectory import Trajectory
from services.learner.group_types import GroupSpec
from services.learner.groups.batcher import Batcher
from services.learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from services.learner.sampling.tasks import Task


def ready(number: int, rewards: list[float], *, oldest: int = 0, requeues: int = 0) -> ReadyGroup:
    name = f"g{number}r{requeues}"
    spec = GroupSpec(
        name, number, Task("t", "env", "{}"), Purpose.TRAIN, len(rewards), 1.0, requeues
    )
    records = tuple(
        AttemptRecord(
            Trajectory(AttemptKey(name, i, 0), "", (), b"", reward=r), 1, 1, oldest, oldest
        )
        for i, r in enumerate(rewards)
    )
    return ReadyGroup(spec, records, ())


def make(*groups: ReadyGroup, staleness: int = 1, drop: bool = False) -> Batcher:
    batcher = Batcher(
        groups_per_step=2, max_staleness=staleness, without_signal="drop" if drop else "mask"
    )
    for group in groups:
        batcher.add_group(group)
    return batcher


def test_groups_leave_oldest_first_whatever_order_they_came_in() -> None:
    batcher = make(ready(5, [0, 1]), ready(1, [0, 1]), ready(3, [0, 1]))
    batch = batcher.take_batch(0)
    assert batch is not None
    assert [group.spec.sequence_number for group in batch.groups] == [1, 3]
    assert len(batcher) == 1
    assert batcher.take_batch(0) is None


def test_constant_groups_are_left_out_of_the_plan_but_not_of_the_step() -> None:
    batch = make(ready(0, [1, 1]), ready(1, [0, 1]), drop=True).take_batch(0)
    assert batch is not None
    assert [key.group_id for key in batch.attempt_keys] == ["g1r0", "g1r0"]
    assert [group.spec.group_id for group in batch.filtered] == ["g0r0"]
    assert len(batch.all_groups) == 2


def test_a_step_of_constant_groups_alone_keeps_them() -> None:
    batch = make(ready(0, [1, 1]), ready(1, [0, 0]), drop=True).take_batch(0)
    assert batch is not None
    assert len(batch.groups) == 2
    assert not batch.filtered


def test_masked_constant_groups_stay_in_the_plan() -> None:
    batch = make(ready(0, [1, 1]), ready(1, [0, 1])).take_batch(0)
    assert batch is not None
    assert len(batch.attempt_keys) == 4


@pytest.mark.parametrize(("staleness", "left"), [(0, 0), (1, 1), (2, 2)])
def test_what_is_staler_than_the_bound_is_dropped_and_never_taken(
    staleness: int, left: int
) -> None:
    batcher = make(ready(0, [0, 1], oldest=3), ready(1, [0, 1], oldest=4), staleness=staleness)
    assert (batcher.take_batch(5) is not None) == (left == 2)
    batcher = make(ready(0, [0, 1], oldest=3), ready(1, [0, 1], oldest=4), staleness=staleness)
    assert len(batcher.drop_stale(5)) == 2 - left
    assert len(batcher) == left
