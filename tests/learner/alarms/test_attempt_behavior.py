"""A policy that earns nothing is reported by what it does instead."""

from collections.abc import Sequence
from typing import Any

import pytest

from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.trajectory import Counts, Trajectory
from flotilla_learner.alarms.attempt_behavior import sum_attempts
from tests.support.alarm_steps import alarms, facts


def attempt(
    number: int,
    *,
    reward: float = 0.0,
    stop: StopReason = StopReason.DONE,
    checks_failed: tuple[str, ...] = (),
    **counts: Any,
) -> Trajectory:
    """An attempt that is offered tools, calls two of them without an error and reports done."""
    values: dict[str, Any] = {"turns": 4, "tools": 3, "tool_calls": 2, **counts}
    return Trajectory(
        AttemptKey("g", number, 0),
        "",
        (),
        b"",
        reward=reward,
        stop_reason=stop,
        checks_failed=checks_failed,
        counts=Counts(**values),
    )


UNKNOWN: dict[str, Any] = {"unknown_tools": {"search": 2}, "tool_errors": {"bad_tool": 2}}
CASES: dict[str, tuple[Sequence[Trajectory], str]] = {
    "unknown tools": (
        [*(attempt(n, **UNKNOWN) for n in range(14)), *(attempt(n) for n in range(18))],
        "calls tools that this server does not have: search (42 of 96 episodes)",
    ),
    "no calls": (
        [*(attempt(n, tool_calls=0) for n in range(30)), attempt(30), attempt(31)],
        "never calls a tool (90 of 96 episodes)",
    ),
    "parse errors": (
        [
            attempt(n, tool_calls=0, malformed_turns=3, parse_messages={"not valid JSON": 3})
            for n in range(32)
        ],
        "has parse errors in 75% of turns: not valid JSON (288)",
    ),
    "turns": (
        [attempt(n, stop=StopReason.MAX_TURNS) for n in range(32)],
        "stops by MAX_TURNS (96 of 96 episodes)",
    ),
    **{
        f"limit of {stop}": (
            [attempt(n, stop=stop) for n in range(32)],
            f"stops by {stop.upper()} (96 of 96 episodes)",
        )
        for stop in (
            StopReason.MAX_SAMPLED_TOKENS,
            StopReason.MAX_CALLS,
            StopReason.MAX_PARSE_ERRORS,
        )
    },
    "failing calls": (
        [attempt(n, tool_errors={"bad_arguments": 2}) for n in range(32)],
        "makes calls that fail (192 of 192): bad_arguments (192)",
    ),
    "loops": ([attempt(n, repeats=1) for n in range(32)], "repeats the same calls (96 of 192)"),
    "wrong": (
        [attempt(n, checks_failed=("the room is booked",)) for n in range(32)],
        "after 2.0 tool calls each; checks that fail: the room is booked (96)",
    ),
    "answers to questions": (
        [attempt(n, tools=0, tool_calls=0) for n in range(32)],
        "done in 96 of 96 episodes, after 0.0 tool calls each",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_policy_without_any_reward_for_three_steps_is_reported_by_its_acts(name: str) -> None:
    attempts, words = CASES[name]
    raiser, heard = alarms()
    for step in (1, 2):
        raiser.judge_step(facts(step, conduct={"shop": sum_attempts(attempts)}))
    assert heard.names == []
    raiser.judge_step(facts(3, conduct={"shop": sum_attempts(attempts)}))
    assert heard.names == ["+no_reward/shop"]
    verdict = heard.alarms[0].verdict
    assert verdict.cause.startswith("in steps 1 to 3 no attempt of 96 got a reward: the policy ")
    assert words in verdict.cause
    assert verdict.fix
    raiser.judge_step(
        facts(4, conduct={"shop": sum_attempts([*attempts, attempt(99, reward=0.5)])})
    )
    assert heard.names[-1] == "-no_reward/shop"


def test_one_reward_in_three_steps_is_a_beginning() -> None:
    raiser, heard = alarms()
    for step in range(1, 20):
        found = [attempt(n, reward=float(step % 3 == 0 and n == 0)) for n in range(8)]
        raiser.judge_step(facts(step, conduct={"shop": sum_attempts(found)}))
    assert heard.names == []


def test_an_environment_is_judged_by_the_steps_that_it_is_part_of() -> None:
    raiser, heard = alarms()
    none, some = sum_attempts([attempt(0)]), sum_attempts([attempt(0, reward=1.0)])
    for step in range(1, 6):
        rare = {"rare": none} if step % 2 else {}
        raiser.judge_step(facts(step, conduct={"shop": some, **rare}))
    assert heard.names == ["+no_reward/rare"]
    assert "in steps 1 to 5" in heard.alarms[0].verdict.cause
