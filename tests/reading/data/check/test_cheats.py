"""Cheats: what a prompt demands, and false answers."""

import re

import pytest

from flotilla_reading.data.check.cheats import (
    alter_objects,
    alter_values,
    find_demanded,
    list_false_answers,
)
from flotilla_reading.play.solutions import SolutionCall
from flotilla_reading.play.world import Step

FOUND = Step(SolutionCall("find_issues", {"label": "crash"}), "ok", '[{"id": 25}]')
ASSIGNED = Step(SolutionCall("assign_issue", {"issue_id": 25, "user": "Kim"}), "ok", "{}")
CLOSED = Step(SolutionCall("closeIssue", {"issue_id": 25}), "ok", "{}")


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


@pytest.mark.parametrize(
    ("prompt", "demanded"),
    [
        ("Assign the crash issue to Kim and close it.", [1, 2]),
        ("Assign the crash issue to him and end it.", [1]),
        ("Kim has the crash issue; it is closed.", [1]),
        ("Who has the crash issue?", []),
        ("Assign it to Kim, and close it if you like.", []),
    ],
)
def test_a_step_is_demanded_if_the_prompt_has_its_tool_or_value_and_leaves_no_choice(
    prompt: str, demanded: list[int]
) -> None:
    assert find_demanded([FOUND, ASSIGNED, CLOSED], [1, 2], prompt) == demanded


def test_a_step_that_is_done_twice_or_by_itself_is_not_demanded() -> None:
    prompt = "Assign the crash issue to Kim and close it."
    assert find_demanded([FOUND, ASSIGNED, CLOSED, ASSIGNED], [1, 2, 3], prompt) == [2]
    assert find_demanded([FOUND, CLOSED], [1], prompt) == []


def test_a_step_is_demanded_if_only_it_needs_what_the_prompt_lets_the_solution_find() -> None:
    steps = [
        Step(SolutionCall("find_item", {"item": item}), "ok", f'{{"id": {number}}}')
        for item, number in (("lamp", 7), ("desk", 9))
    ]
    steps += [
        Step(SolutionCall("create_order", {"item_id": number}), "ok", "{}") for number in (7, 9)
    ]
    assert find_demanded(steps, [2, 3], "Buy a lamp, and a desk.") == [2, 3]
    assert find_demanded(steps, [2, 3], "Buy a lamp.") == [2]


def test_each_id_that_was_the_only_one_is_replaced_by_others() -> None:
    customer = Step(SolutionCall("find_customer", {"name": "Kim"}), "ok", '{"id": 4}')
    items = Step(SolutionCall("find_items", {}), "ok", '[{"id": 1}, {"id": 2}]')
    order = {"customer_id": 4, "item_id": 2, "count": 3}
    ordered = Step(SolutionCall("order", order), "ok", "{}")
    (others,) = alter_objects([customer, items, ordered], 2)
    assert others[0].arguments == {**order, "customer_id": 5}
    assert [each.arguments["customer_id"] for each in others[:4]] == [5, 3, 6, 2]
    (others, more) = alter_objects([customer, Step(items.call, "ok", '{"id": 2}'), ordered], 2)
    assert more[0].arguments == {**order, "item_id": 3}


def test_the_right_number_is_hidden_between_wrong_ones() -> None:
    cheats = {cheat.name: cheat.answer for cheat in list_false_answers("It is 42.")}
    numbers = re.findall(r"\d+", cheats["the solution's answer among others"])
    assert numbers[1] == "42"
    assert "42" not in (numbers[0], numbers[2])
    several = [cheat.answer for cheat in list_false_answers("3, 5")]
    assert several == ["3, 8", ".*", "*", "{}", "[{}]"]


@pytest.mark.parametrize(
    ("answer", "other"), [("It is 42.", "It is 0."), ("1,200", "0"), ("7", "")]
)
def test_a_number_far_from_0_must_not_be_0(answer: str, other: str) -> None:
    cheats = {cheat.name: cheat.answer for cheat in list_false_answers(answer)}
    assert cheats.get("the solution's answer with the number 0", "") == other


def test_a_pattern_that_is_the_answer_is_no_cheat() -> None:
    assert "*" not in [cheat.answer for cheat in list_false_answers("*")]
