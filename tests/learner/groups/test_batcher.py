"""Groups that a step takes, and groups that it leaves."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey, Purpose
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence, Trajectory, TurnTiming
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.batcher import Batcher, build_train_batch
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.tracking.histograms import step_histograms
from flotilla_learner.tracking.metric_formulas import judge_score_metrics, reward_metrics
from flotilla_learner.types import TurnTokens


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


def attempt(turns: list[tuple[int, float | None]], *policy_tokens: int) -> Trajectory:
    """An attempt whose turns have so many tokens and such rewards, and whose sequences have so many
    of the policy's after one of the prompt."""
    sequences = tuple(
        Sequence(
            np.zeros(1 + count, np.int32),
            (Span(Author.PROMPT, 1), Span(Author.POLICY, count, PolicyId(1, 0, b"f" * 32), 1.0)),
            np.zeros(count, np.float32),
        )
        for count in policy_tokens
    )
    timings = tuple(TurnTiming(0.0, 0.0, 1, count, reward) for count, reward in turns)
    return Trajectory(AttemptKey("g", 0, 0), "", sequences, b"", reward=1.0, turns=timings)


def turns_in_batch(trajectory: Trajectory) -> list[list[TurnTokens]]:
    batch = build_train_batch(1, [trajectory])
    return [list(sequence.turns) for sequence in batch.sequences]


def test_the_tokens_of_rewarded_turns_are_known_to_the_ranks() -> None:
    made = attempt([(3, 0.5), (2, None), (4, -1.0)], 9)
    assert turns_in_batch(made) == [[(0, 3, 0.5), (1, 2, None), (2, 4, -1.0)]]


def test_a_turn_may_continue_in_the_next_sequence() -> None:
    made = attempt([(3, 0.5), (4, 1.5), (0, 2.0), (1, 3.0)], 5, 3)
    assert turns_in_batch(made) == [[(0, 3, 0.5), (1, 2, 1.5)], [(1, 2, 1.5), (3, 1, 3.0)]]


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [(3, None), (2, None)],
        # Other tokens than the sequences have.
        [(3, 1.0), (1, None)],
        # Beyond what any reward may be.
        [(3, 1e300), (2, -1.1e6)],
    ],
)
def test_without_a_usable_reward_of_a_turn_no_turns_travel(
    turns: list[tuple[int, float | None]],
) -> None:
    assert turns_in_batch(attempt(turns, 5)) == [[]]


def test_named_rewards_reach_the_ranks_with_every_sequence() -> None:
    made = replace(attempt([], 2, 3), named_rewards={"style": 0.5})
    rows = build_train_batch(1, [made]).sequences
    assert [row.named_rewards for row in rows] == [{"style": 0.5}] * 2


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


def judged(group: ReadyGroup) -> ReadyGroup:
    """The same group, whose rewards are a judge's scores."""
    records = (replace(r, trajectory=replace(r.trajectory, judged=True)) for r in group.graded)
    return replace(group, graded=tuple(records))


def test_judged_groups_are_trained_on_and_teach_the_curriculum_nothing() -> None:
    batch = make(ready(1, [1.0, 0.0]), judged(ready(2, [1.0, 0.5]))).take_batch(0)
    assert batch is not None
    assert len(batch.groups) == 2
    assert [outcome.rewards for outcome in batch.outcomes] == [[1.0, 0.0]]


def test_no_figure_of_rewards_contains_a_judges_score() -> None:
    graded, scored = ready(1, [1.0, 0.0]), judged(ready(2, [1.0, 0.5, 0.0]))
    assert reward_metrics([graded, scored]) == reward_metrics([graded])
    assert reward_metrics([scored]) == {}
    assert judge_score_metrics([graded]) == {}
    found = judge_score_metrics([graded, scored])
    assert found["judge/env/best_minus_mean"] == 0.5
    assert found["judge/env/signal_ratio"] == 1.0
    assert step_histograms([scored], 0).keys() == step_histograms([graded], 0).keys() ^ {
        *("judge/distribution", "reward/distribution")
    }
