"""What a task gives away, and what it rightly says."""

import json
from typing import Any

import pytest

from flotilla_reading.data.check.leaks import find_leak
from flotilla_reading.play.solutions import SolutionCall
from flotilla_reading.play.world import Step


def step(tool: str, result: Any, /, **arguments: Any) -> Step:
    text = result if isinstance(result, str) else json.dumps(result)
    return Step(SolutionCall(tool, arguments), "ok", text)


ONE = [
    step("find_hotel", [{"id": 42, "name": "Ritz", "stars": 5}], name="Ritz"),
    step("book", {"ok": True}, hotel_id=42, guest="Ann", nights=2),
]
MANY = [
    step("list_orders", [{"order_id": "W2378156"}, {"order_id": "W9911"}], user="ann"),
    step("cancel_order", {"ok": True}, order_id="W2378156"),
]


@pytest.mark.parametrize(
    "said",
    [
        "hotel_id: 42",
        '{"hotel_id": 42}',
        "book(hotel_id=42)",
        "book(42, 'Ann')",
        "(Internal: hotel 42)",
        "The hotel id is 42.",
        "(id 42)",
        "ID: `42`",
        "The answer is 42.",
        "Hint: the one you want is number 42.",
        "TARGET_HOTEL_ID: 42",
        "preferred_hotel_id=42",
        "See https://hotels.test/hotels/42.",
        "Take hotel no. 42 as always.",
        "The hotel number is 42.",
    ],
)
def test_an_id_that_only_a_call_can_tell_is_given_away_where_it_is_named(said: str) -> None:
    assert find_leak(f"Book the Ritz for Ann. {said}", "", ONE, None)


@pytest.mark.parametrize(
    "prompt",
    [
        "Book the Ritz for Ann, 2 nights, at most $42 each.",
        "Book room 42 of the Ritz for Ann.",
        "Book the Ritz for Ann on 2026-03-42.",
        "Answer with the id of the hotel. Ann is 42 years old.",
        "Book the Ritz for Ann; her booking has the id 421.",
        "Book the Ritz for Ann; see https://hotels.test/hotels/421 and /rooms/42.",
        "Book the Ritz, hotel number one, for Ann and 42 others.",
    ],
)
def test_numbers_that_coincide_are_no_leak(prompt: str) -> None:
    assert find_leak(prompt, '[{"id": 42, "name": "Ritz"}]', ONE, None) == ""


def test_a_task_may_name_the_one_that_is_meant_among_several() -> None:
    assert find_leak("Cancel my order W2378156.", "", MANY, None) == ""
    assert find_leak("Cancel my newest order. The answer: W2378156.", "", MANY, None)
    alone = [step("list_orders", [{"order_id": "W2378156"}], user="ann"), MANY[1]]
    assert find_leak("Cancel my only order (W2378156).", "", alone, None)


def test_a_value_that_the_solution_used_before_any_result_showed_it_is_given() -> None:
    steps = [step("get", {"order_id": 4711}, order_id=4711), step("cancel", {}, order_id=4711)]
    assert find_leak("Cancel the order with the order_id: 4711.", "", steps, None) == ""


@pytest.mark.parametrize(
    ("prompt", "answer", "leaks"),
    [
        ("Tom has 5 apples and gets 3. How many?", "5 + 3 = 8\n#### 8", False),
        ("Tom has 8 apples and gives 3 away. How many?", "8 - 3 = 5\n#### 5", False),
        ('Tom has 5 apples. Output the final answer after "####".', "#### 5", False),
        ("Tom has 5 apples and gets 3. How many? #### 8", "5 + 3 = 8\n#### 8", True),
        ("Tom has 5 apples and gets 3. (Answer: 8)", "#### 8", True),
        ("Tom has 5 apples and gets 3. The answer is 8.", "\\boxed{8}", True),
        ("Tom has 5 apples and gets 30. The answer is not 8.5.", "#### 8", False),
        ("Tom has 5 apples and gets 3. [expected result: 8]", "#### 8", True),
        ("Tom has 5 apples and gets 3. Hint: it is 8.", "#### 8", True),
        ("EXPECTED_ANSWER: 8\nTom has 5 apples and gets 3.", "#### 8", True),
        ("He expected 8, and 3 came. How many did not?", "#### 5", False),
        ("Which is correct: a) iron b) gold?", "a", False),
        ("Is it A, B or C? Answer: A, B or C.", "A", False),
        ("Is it true? Answer yes or no.", "yes", False),
        ("Is it true? Answer: yes", "yes", True),
    ],
)
def test_an_answer_is_given_away_where_it_is_announced(
    prompt: str, answer: str, *, leaks: bool
) -> None:
    assert bool(find_leak(prompt, "", [], answer)) is leaks


def test_an_answer_that_a_call_told_and_that_is_no_coincidence_is_given_away_anywhere() -> None:
    steps = [step("find_person", {"phone": "555-1234"}, name="Ann")]
    assert find_leak("Who is Ann? Call her at 555-1234.", "", steps, "555-1234")
    assert find_leak("What is Ann's phone?", "Ann | 555-1234", steps, "555-1234")
    assert find_leak("What is Ann's phone?", "Ann | 555-9999", steps, "555-1234") == ""
