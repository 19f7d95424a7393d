"""The order of tasks: the same however a run is cut, and fast."""

import random
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_learner.config.sampling import SamplingConfig
from flotilla_learner.sampling.curriculum import Curriculum, NoTasksError
from flotilla_learner.sampling.curriculum_changes import (
    EventKind,
    StoredCurriculum,
    TaskStanding,
    TaskState,
)
from flotilla_learner.sampling.group_signal import GroupOutcome
from flotilla_learner.sampling.tasks import Task
from tests.support.curriculum import Run, config, made_up, tasks_of
from tests.support.examples import examples

LEARNING = {"difficulty": {"enabled": True, "probe_share": 0.2}}
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def play(run: Run, steps: int, kills: set[int] | None = None, *, broken: str = "") -> None:
    """Whole steps; a kill comes after so many draws in all. `broken` is never graded."""
    for _ in range(steps):
        batch = []
        for _ in range(run.window):
            if kills and len(run.drawn) in kills:
                run.kill()
            number = len(run.drawn)
            batch.append(made_up(run.draw(), number))
        if broken and run.step == 2:
            run.curriculum.condemn_task(broken, "it broke")
        run.learn(batch)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 99), sizes=SIZES, window=st.integers(4, 9), data=st.data())
def test_a_run_that_was_killed_anywhere_draws_what_it_would_have_drawn(
    seed: int, sizes: list[int], window: int, data: st.DataObject
) -> None:
    tasks = tasks_of(**{f"env{n}": size for n, size in enumerate(sizes)})
    mixing = data.draw(st.sampled_from(["uniform", "proportional"]))
    sampling = config(mixing=mixing, min_per_env=data.draw(st.integers(0, 1)), **LEARNING)
    kills = data.draw(st.sets(st.integers(0, 12 * window), max_size=6))
    whole, cut = (Run(tasks, sampling, seed=seed, window=window) for _ in range(2))
    play(whole, 12, broken="env01")
    play(cut, 12, kills, broken="env01")
    assert cut.drawn == whole.drawn
    assert cut.changes == whole.changes


def test_a_draw_is_a_function_of_the_seed_the_number_and_the_changes_before_it() -> None:
    tasks = tasks_of(a=7, b=3)
    runs = [Run(tasks, config(), seed=seed, window=4) for seed in (1, 1, 2)]
    for run in runs:
        play(run, 6)
    assert runs[0].drawn == runs[1].drawn
    assert runs[0].drawn != runs[2].drawn


def test_every_pass_has_every_task_once_in_another_order_and_small_environments_repeat() -> None:
    """No epoch ends with its smallest environment."""
    run = Run(tasks_of(a=12, b=3), config(), seed=3, window=6)
    play(run, 12)
    of_a = [key for key in run.drawn if key.startswith("a")]
    of_b = [key for key in run.drawn if key.startswith("b")]
    assert len(of_a) == len(of_b) == 36
    passes = [of_b[at : at + 3] for at in range(0, 36, 3)]
    assert {frozenset(one) for one in passes} == {frozenset({"b0", "b1", "b2"})}
    assert len({tuple(one) for one in passes}) > 1
    assert Counter(Counter(of_a).values()) == {3: 12}
    assert run.curriculum.whole_passes() == {"a": 2, "b": 11}
    assert run.curriculum.distinct_tasks == 15


def test_epochs_are_of_steps_or_of_as_many_groups_as_there_are_tasks() -> None:
    run = Run(tasks_of(a=8, b=4), config(), seed=0, window=6)
    play(run, 4)
    assert run.curriculum.epoch_at(4) == 2.0
    run = Run(tasks_of(a=8, b=4), config(epoch_steps=8), seed=0, window=6)
    play(run, 4)
    assert run.curriculum.epoch_at(4) == 0.5


def test_steps_that_draw_nothing_are_no_part_of_an_epoch() -> None:
    tasks, chosen = tasks_of(a=8), config(epoch_steps=8)
    late = Curriculum(tasks, chosen, seed=0, window=6, steps_before=10)
    assert late.epoch_at(14) == 0.5


def learn_of(run: Run, key: str, rewards: list[float]) -> list[EventKind]:
    return [event.kind for event in run.learn([GroupOutcome(key, rewards)]).events]


@pytest.mark.parametrize(
    ("rewards", "standing"),
    [([1.0] * 4, TaskStanding.SOLVED), ([0.0] * 4, TaskStanding.IMPOSSIBLE)],
)
def test_a_task_is_parked_when_groups_enough_have_taught_nothing(
    rewards: list[float], standing: TaskStanding
) -> None:
    run = Run(tasks_of(a=3), config(**LEARNING), seed=0, window=3)
    assert learn_of(run, "a1", rewards) == []
    assert learn_of(run, "a1", rewards) == [EventKind.PARKED]
    assert run.curriculum.standing_of("a1") is standing
    drawn = [run.draw().key for _ in range(60)]
    # One of five draws tries a parked task.
    assert drawn.count("a1") == 12


def test_a_task_with_signal_is_never_parked_whatever_its_pass_rate() -> None:
    run = Run(tasks_of(a=3), config(**LEARNING), seed=0, window=3)
    for _ in range(5):
        assert learn_of(run, "a1", [0.2, 0.4, 0.0, 0.0]) == []
    assert run.curriculum.standing_of("a1") is TaskStanding.ACTIVE


def test_a_parked_task_that_teaches_again_comes_back() -> None:
    run = Run(tasks_of(a=3), config(**LEARNING), seed=0, window=3)
    for _ in range(2):
        learn_of(run, "a1", [0.0] * 4)
    assert learn_of(run, "a1", [1.0, 0.0, 0.0, 0.0]) == [EventKind.UNPARKED]
    assert run.curriculum.standing_of("a1") is TaskStanding.ACTIVE
    assert {run.draw().key for _ in range(6)} == {"a0", "a1", "a2"}


def test_parked_tasks_are_tried_again_in_turn_and_even_when_nothing_else_is_left() -> None:
    run = Run(tasks_of(a=4), config(**LEARNING), seed=0, window=2)
    for key in ("a2", "a0", "a3", "a1"):
        for _ in range(2):
            learn_of(run, key, [1.0] * 4)
    assert [run.draw().key for _ in range(8)] == ["a2", "a0", "a3", "a1"] * 2


def test_nothing_is_parked_when_the_curriculum_is_off() -> None:
    run = Run(tasks_of(a=3), config(), seed=0, window=3)
    for _ in range(5):
        assert learn_of(run, "a1", [1.0] * 4) == []


def test_what_was_parked_is_drawn_again_once_the_curriculum_is_off() -> None:
    states = tuple(TaskState(f"a{n}", "a", TaskStanding.SOLVED) for n in range(3))
    stored = StoredCurriculum(0, {}, (*states, TaskState("a3", "a", TaskStanding.QUARANTINED)))
    curriculum = Curriculum(tasks_of(a=5), config(), seed=0, window=5, stored=stored)
    assert {curriculum.draw_task().key for _ in range(12)} == {"a0", "a1", "a2", "a4"}


def test_a_quarantined_task_never_comes_back() -> None:
    run = Run(tasks_of(a=5), config(), seed=0, window=5)
    run.curriculum.condemn_task("a3", "no verifier")
    change = run.curriculum.flush_condemned()
    assert change is not None
    run.commit(change)
    assert [(e.task, e.kind, e.reason) for e in change.events] == [
        ("a3", EventKind.QUARANTINED, "no verifier")
    ]
    run.kill()
    assert {run.draw().key for _ in range(20)} == {"a0", "a1", "a2", "a4"}
    assert run.curriculum.flush_condemned() is None


def test_no_more_of_an_environment_is_quarantined_than_its_share() -> None:
    run = Run(tasks_of(a=20, b=2, c=1), config(quarantine_share=0.1), seed=0, window=3)
    for key in ("a0", "a1", "a2", "b0", "b1", "c0"):
        run.curriculum.condemn_task(key, "broken")
    change = run.curriculum.flush_condemned()
    assert change is not None
    assert [event.task for event in change.events if event.kind is EventKind.QUARANTINED] == [
        "a0",
        "a1",
        "b0",
    ]
    refused = [e.task for e in change.events if e.kind is EventKind.QUARANTINE_REFUSED]
    assert refused == ["a2", "b1", "c0"]


def test_an_environment_without_a_task_that_may_be_drawn_is_named() -> None:
    states = (TaskState("a0", "a", TaskStanding.QUARANTINED),)
    with pytest.raises(NoTasksError, match="all 1 tasks of environment 'a' are quarantined"):
        Curriculum(
            tasks_of(a=1), config(), seed=0, window=1, stored=StoredCurriculum(1, {}, states)
        )


def test_ten_thousand_draws_of_a_hundred_thousand_tasks_take_no_time() -> None:
    tasks = [Task(f"t{n}", f"env{n % 10}", "{}") for n in range(100_000)]
    chooser = random.Random(0)
    standings = [TaskStanding.ACTIVE, TaskStanding.SOLVED, TaskStanding.IMPOSSIBLE]
    states = [TaskState(t.key, t.env_key, chooser.choice(standings)) for t in tasks]
    sampling = config(difficulty={"enabled": True})
    stored = StoredCurriculum(0, {}, tuple(states))
    curriculum = Curriculum(tasks, sampling, seed=0, window=64, stored=stored)
    curriculum.catch_up(64)
    started = time.perf_counter()
    curriculum.catch_up(64 + 10_000)
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    "values",
    [
        {"mixing": "weights"},
        {"mixing": "weights", "weights": {"a": 0.0}},
        {"mixing": "uniform", "weights": {"a": 1.0}},
        {"difficulty": {"solved": 0.1, "impossible": 0.2}},
        {"difficulty": {"probe_share": 0.9}},
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"weight|solved|probe_share"):
        config(**values)


def test_the_default_is_what_the_documentation_says() -> None:
    assert SamplingConfig().mixing == "uniform"
    assert not SamplingConfig().difficulty.enabled
