"""The verifier that `flotilla init` writes into a folder."""

import json
from typing import Any

import pytest

from flotilla_reading.own_tools.written.verifier import answers_as, lines_of, verify


class ToolError(Exception):
    """As the gateway's worker raises it."""


class Notes:
    """An environment with one tool, which answers or refuses."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def call_tool(self, name: str, /, **arguments: Any) -> Any:
        if self.answer is None:
            raise ToolError(f"{name} {arguments}: there is none")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def expects(lines: Any) -> dict[str, Any]:
    return {"state": [{"tool": "read", "arguments": {"name": "milk"}, "lines": lines}]}


@pytest.mark.parametrize(
    ("lines", "answer", "score"),
    [
        ([["no milk"]], "no milk\n", 1),
        ([["no milk"]], "no milk at all", 0),
        ([["b"], ["a"]], "a\nb", 1),
        ([["a"]], "a\na", 0),
        ([["made at ", " by Ann"]], "made at 12:04 by Ann", 1),
        ([["made at ", " by Ann"]], "made at by Ann", 0),
        ([["made at ", " by Ann"]], "made at 12 04 by Ann", 0),
        ([['[{"n": 1}, {"n": 2}]']], [{"n": 2}, {"n": 1}], 1),
        ([['[{"n": 1}, {"n": 2}]']], "[{'n': 2}, {'n': 1}]", 1),
        ([['[{"n": 1}, {"n": 2}]']], [{"n": 2}, {"n": 2}], 0),
        (None, None, 1),
        (None, "it is there", 0),
        ([["it is there"]], None, 0),
    ],
)
def test_a_state_passes_only_if_its_tools_answer_as_expected(
    lines: Any, answer: Any, score: int
) -> None:
    assert verify(Notes(answer), metadata=expects(lines))["score"] == score


def test_a_line_with_gaps_takes_none_that_another_expects_exactly() -> None:
    expected = [["at ", ""], ["at noon"]]
    assert answers_as(expected, ["at noon", "at dawn"])
    assert not answers_as(expected, ["at dawn", "at dusk"])


def test_a_failure_that_is_no_tools_answer_is_no_grade() -> None:
    with pytest.raises(EOFError):
        verify(Notes(EOFError("the gateway has gone")), metadata=expects(None))


@pytest.mark.parametrize(
    ("answer", "score"),
    [("42", 1), (" 42. ", 1), ("420", 0), ("41\n42\n43", 0), (".*", 0), ("", 0), (None, 0)],
)
def test_only_the_expected_answer_passes(answer: str | None, score: int) -> None:
    assert verify(Notes(""), answer, {"answer": "42"})["score"] == score


def test_a_task_that_expects_nothing_is_never_passed() -> None:
    assert verify(Notes(""), "done", {})["score"] == 0


def test_deep_or_broken_literals_are_lines_as_they_are() -> None:
    for text in ("[" * 5000, "{'a': ", "[open](http://x)"):
        assert lines_of(text) == [text.rstrip()]
    assert lines_of("[1, 2]") == [json.dumps([1, 2])]
