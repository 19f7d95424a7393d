"""Checks that a verifier returned with its score, from its process or from Fleet to the grade."""

import json
from typing import Any

import pytest

from services.env_gateway.adapters.fleet.verifier import parse_execution
from services.env_gateway.grading.verdict import judge_execution
from services.env_gateway.ports import CheckReport, Execution
from services.env_gateway.verify.protocol import ProtocolError, VerifierDone, parse_message

JUDGED = "JUDGE ERROR: overloaded"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"score": 1, "passed": ["a"], "failed": []}, (1, CheckReport(("a",), ()))),
        ({"score": 1}, (1, None)),
        ({"score": 0, "passed": "a", "failed": []}, (0, None)),
        (0.5, (0.5, None)),
        ([1], ([1], None)),
    ],
)
def test_fleet_passes_on_what_a_verifier_returned(result: Any, expected: Any) -> None:
    execution = parse_execution({"success": True, "result": result, "stdout": JUDGED})
    assert (execution.result, execution.report) == expected


def test_a_report_is_taken_instead_of_what_was_printed() -> None:
    execution = Execution(
        result=0, report=CheckReport(("a",), ("b",)), stdout=f"App c: 1\n{JUDGED}"
    )
    grade = judge_execution(execution, attempts=1)
    assert (grade.reward, grade.partial_reward, grade.checks_passed) == (0.0, 0.5, ("a",))
    assert grade.suspicion == ""


@pytest.mark.parametrize(
    "result",
    [
        {"score": 1, "passed": [1], "failed": []},
        {"score": 1, "passed": [], "failed": {}},
        {"score": [], "passed": [], "failed": []},
        {"score": 1, "passed": [], "failed": [], "more": 1},
        {"score": 1},
    ],
)
def test_a_process_may_report_lists_of_texts_and_no_more(result: Any) -> None:
    with pytest.raises(ProtocolError):
        parse_message(json.dumps({"done": {"result": result, "stdout": ""}}).encode())


def test_a_report_crosses_the_protocol() -> None:
    report = {"score": 0, "passed": ["a"], "failed": []}
    done = parse_message(json.dumps({"done": {"result": report, "stdout": "x"}}).encode())
    assert done == VerifierDone(report, "x", None)
