"""Checks that a verifier returned with its score, from its process or from Fleet to the grade."""

import json
from typing import Any

import pytest

from flotilla_env_gateway.adapters.fleet.verifier import parse_execution
from flotilla_env_gateway.grading.verdict import judge_execution
from flotilla_env_gateway.ports import CheckReport, Execution
from flotilla_env_gateway.verify.protocol import ProtocolError, VerifierDone, parse_message

JUDGED = "JUDGE ERROR: overloaded"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"score": 1, "passed": ["a"], "failed": []}, (1, CheckReport(("a",), ()), None)),
        ({"score": 1}, (1, None, None)),
        ({"score": 1, "rewards": {"style": 0.5}}, (1, None, {"style": 0.5})),
        (
            {"score": 0, "passed": [], "failed": ["b"], "rewards": {"style": 1}},
            (0, CheckReport((), ("b",)), {"style": 1}),
        ),
        ({"score": 0, "passed": "a", "failed": []}, (0, None, None)),
        (0.5, (0.5, None, None)),
        ([1], ([1], None, None)),
    ],
)
def test_fleet_passes_on_what_a_verifier_returned(result: Any, expected: Any) -> None:
    execution = parse_execution({"success": True, "result": result, "stdout": JUDGED})
    assert (execution.result, execution.report, execution.rewards) == expected


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
        {"score": 1, "rewards": {"style": 1}, "more": 1},
        {"score": 1, "rewards": {"style": 1}, "passed": []},
        {"score": 1, "rewards": {"style": [1]}},
        {"score": 1, "rewards": [1]},
        {"rewards": {"style": 1}},
        {"score": 1},
    ],
)
def test_a_process_may_report_lists_of_texts_and_no_more(result: Any) -> None:
    with pytest.raises(ProtocolError):
        parse_message(json.dumps({"done": {"result": result, "stdout": ""}}).encode())


@pytest.mark.parametrize("rewards", [{}, {"rewards": {"style": 0.5, "judge": None}}], ids=str)
def test_a_report_crosses_the_protocol(rewards: dict[str, Any]) -> None:
    report = {"score": 0, "passed": ["a"], "failed": [], **rewards}
    done = parse_message(json.dumps({"done": {"result": report, "stdout": "x"}}).encode())
    assert done == VerifierDone(report, "x", None)
