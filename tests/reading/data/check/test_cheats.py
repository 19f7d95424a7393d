"""Cheats: what a prompt demands, and false answers."""

import re

import pytest

from services.reading.data.check.cheats import alter_values, find_demanded, list_false_answers
from services.reading.play.solutions import SolutionCall

CALLS = [
    SolutionCall("find_issues", {"label": "crash"}),
    SolutionCall("assign_issue", {"issue_id": 25, "user": "Kim"}),
    SolutionCall("closeIssue", {"issue_id": 25}),
]


@pytest.mark.parametrize(
    ("prompt", "is_exact"),
    [
        ("Order 3 lamps.", True),
        ("Change the lamps from 2 to 3.", True),
        ("Order at least 3 lamps, more is fine.", False),
        ("Order 3 lamps or more.", False),
        ("Order between 2 and 3 lamps.", False),
    ],
)
def test_a_number_that_only_bounds_is_not_altered(prompt: str, *, is_exact: bool) -> None:
    altered = alter_values(SolutionCall("order", {"count": 3}), prompt)
    assert (altered is not None) is is_exact


def test_a_step_is_demanded_if_the_prompt_names_its_tool_and_leaves_no_choice() -> None:
    assert find_demanded(CALLS, "Assign the crash issue to Kim and close it.") == [1, 2]
    assert find_demanded(CALLS, "Kim has the crash issue; it is closed.") == []
    assert find_demanded(CALLS, "Assign it to Kim, and close it if you like.") == []
    assert find_demanded([*CALLS, CALLS[1]], "Assign it to Kim and close it.") == [2]


def test_the_right_number_is_hidden_between_wrong_ones() -> None:
    cheats = {cheat.name: cheat.answer for cheat in list_false_answers("It is 42.")}
    numbers = re.findall(r"\d+", cheats["the solution's answer among others"])
    assert numbers[1] == "42"
    assert "42" not in (numbers[0], numbers[2])
    several = [cheat.answer for cheat in list_false_answers("3, 5")]
    assert several == ["3, 8", ".*", "*"]


def test_a_pattern_that_is_the_answer_is_no_cheat() -> None:
    assert [cheat.answer for cheat in list_false_answers("*")] == [".*"]
