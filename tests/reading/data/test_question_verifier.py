"""Answers are compared as text and as numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_reading.data import question_verifier
from flotilla_reading.data.question_verifier import final_of, plain, validate_task


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("\\boxed{4}", "4"),
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("#### 3\nand \\boxed{4}", "4"),
        ("#### 3\n#### 5\nmore", "5"),
        ("\\boxed{never closed", None),
        ("four", None),
    ],
)
def test_the_last_mark_counts_and_a_box_before_all_others(text: str, final: str | None) -> None:
    assert final_of(text) == final


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1,200", "1200", True),
        ("0.50", "\\frac{1}{2}", True),
        ("1/2", "\\dfrac{2}{4}", True),
        ("$ 3 $", "3.", True),
        (".5", "1/2", True),
        ("(1, 2)", "(1,2)", True),
        ("1,2", "12", False),
        ("x+1", "1+x", False),
        ("1/0", "1", False),
        ("1" * 60, "1" * 60, True),
        ("\u0661", "1", False),
        ("-", "", False),
    ],
)
def test_looks_do_not_count_and_formulae_are_compared_as_text(
    one: str, other: str, equal: bool
) -> None:
    assert (plain(one) == plain(other)) is equal


@given(st.text(), st.text())
def test_no_answer_makes_the_verifier_fail(expected: str, answer: str) -> None:
    plain(expected)
    assert validate_task(None, answer)["score"] in (0, 1)


def test_the_verifier_says_what_it_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_verifier, "EXPECTED", "12")
    assert validate_task(None, "#### 12")["passed"] == ["[C] the answer is 12"]
    assert validate_task(None, "#### 13")["failed"] == ["[X] the answer is 13, expected 12"]
    assert validate_task(None, None)["score"] == 0
