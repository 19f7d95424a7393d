"""Which episodes of a run are imitated."""

import pytest

from flotilla_common.domain.attempts import AttemptKey
from flotilla_reading.demonstrations.acceptance import (
    Acceptance,
    AcceptanceRules,
    Candidate,
    accept_episodes,
)


def episode(
    number: int,
    reward: float | None,
    *,
    task: str = "t",
    evaluated: bool = False,
    kept: bool = True,
) -> Candidate:
    return Candidate(AttemptKey("g", number, 0), task, reward, 1, evaluated, kept)


def numbers(found: Acceptance) -> list[int]:
    return [each.key.attempt_index for each in found.accepted]


def test_episodes_count_from_the_least_reward_on_and_each_has_one_fate() -> None:
    given = [
        *(episode(0, 1.0), episode(1, 0.5), episode(2, None), episode(3, 0.0)),
        *(episode(4, 1.0, evaluated=True), episode(5, None, evaluated=True)),
    ]
    found = accept_episodes(given, AcceptanceRules())
    assert numbers(found) == [0]
    assert found.counts == {
        **{"episodes": 6, "accepted": 1, "below_min_reward": 2},
        **{"ungraded": 1, "evaluated": 2, "not_best": 0},
    }
    assert numbers(accept_episodes(given, AcceptanceRules(min_reward=0.5))) == [0, 1]


def test_a_least_reward_below_zero_accepts_every_grade() -> None:
    given = [episode(0, -1.0), episode(1, 0.0)]
    assert numbers(accept_episodes(given, AcceptanceRules(min_reward=-1.0))) == [0, 1]
    assert numbers(accept_episodes(given, AcceptanceRules(min_reward=0.0))) == [1]


def test_best_of_takes_one_of_each_so_many_attempts_at_a_task_in_the_order_of_the_run() -> None:
    rewards = [0.0, 1.0, 0.3, 0.2, 0.9]
    given = [episode(n, reward, task="a") for n, reward in enumerate(rewards)]
    # Attempts at another task between them count for themselves.
    given.insert(1, episode(9, 0.7, task="b"))
    found = accept_episodes(given, AcceptanceRules(min_reward=0.25, best_of=2))
    assert numbers(found) == [9, 1, 2, 4]
    assert found.counts["not_best"] == 2
    assert found.counts["episodes"] == 6


def test_the_best_of_a_portion_must_still_reach_the_least_reward() -> None:
    given = [episode(0, 0.1), episode(1, 0.4), episode(2, 1.0), episode(3, 0.0)]
    found = accept_episodes(given, AcceptanceRules(best_of=2))
    assert numbers(found) == [2]
    assert (found.counts["not_best"], found.counts["below_min_reward"]) == (2, 1)


@pytest.mark.parametrize(("kept", "chosen"), [((True, True), 0), ((False, True), 1)])
def test_of_equals_the_first_whose_tokens_are_kept_is_the_best(
    kept: tuple[bool, bool], chosen: int
) -> None:
    given = [episode(n, 1.0, kept=there) for n, there in enumerate(kept)]
    assert numbers(accept_episodes(given, AcceptanceRules(best_of=2))) == [chosen]
