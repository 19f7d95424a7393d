"""The bytes that Fleet runs verifiers from, and its reports on their runs."""

import base64
import io
import time
import zipfile
from typing import Any

import cloudpickle
import pytest

from flotilla_common.domain.attempts import NoGradeReason
from flotilla_env_gateway.adapters.fleet.verifier import (
    encode_arguments,
    make_bundle,
    parse_execution,
)
from flotilla_env_gateway.grading.verdict import judge_execution

SOURCE = "def verify(env, final_answer=None):\n    return 1\n"


def test_equal_verifiers_make_equal_bundles_at_any_time() -> None:
    first = make_bundle(SOURCE)
    make_bundle.cache_clear()
    time.sleep(0.01)
    assert make_bundle(SOURCE) == first
    assert make_bundle(SOURCE + "\n").sha256 != first.sha256


def test_a_bundle_holds_the_verifier_and_what_it_needs() -> None:
    with zipfile.ZipFile(io.BytesIO(make_bundle(SOURCE).content)) as archive:
        assert archive.read("verifier.py").decode() == SOURCE
        assert archive.read("requirements.txt").decode() == "fleet-python"


@pytest.mark.parametrize("keywords", [{}, {"final_answer": "42"}, {"conversation": None}])
def test_arguments_are_the_bytes_that_the_sdk_sends(keywords: dict[str, str | None]) -> None:
    content = base64.b64decode(encode_arguments("i1", keywords))
    expected: dict[str, Any] = {"args": (None, {"env": "i1"}), "kwargs": keywords}
    assert cloudpickle.loads(content) == expected
    assert content == cloudpickle.dumps(expected)


@pytest.mark.parametrize(
    ("result", "reward"), [(1, 1.0), (0, 0.0), (0.25, 0.25), (True, 1.0), ({"score": 0.5}, 0.5)]
)
def test_a_result_is_a_grade(result: object, reward: float) -> None:
    execution = parse_execution({"success": True, "result": result, "stdout": "checked"})
    grade = judge_execution(execution, attempts=1)
    assert (grade.reward, grade.reason, grade.stdout) == (reward, None, "checked")


@pytest.mark.parametrize("result", [None, "yes", {"scores": 1}, [1]])
def test_success_without_a_number_is_no_grade(result: object) -> None:
    grade = judge_execution(parse_execution({"success": True, "result": result}), attempts=1)
    assert (grade.reward, grade.reason) == (None, NoGradeReason.EXECUTION_FAILED)


@pytest.mark.parametrize(
    "answer",
    [
        {"success": False, "error": {"type": "KeyError", "message": "'bookings'"}},
        {"success": False, "error": None},
        {"success": False, "result": 0, "error": "the worker died"},
        {"result": 1},
        None,
        [1],
    ],
)
def test_a_failed_execution_is_no_grade_and_worth_another(answer: object) -> None:
    execution = parse_execution(answer)
    assert execution.retryable
    assert judge_execution(execution, attempts=1).reason is NoGradeReason.EXECUTION_FAILED


def test_a_verifier_that_took_too_long_at_fleet_has_timed_out() -> None:
    error = {"type": "TimeoutError", "message": "verifier timed out"}
    grade = judge_execution(parse_execution({"success": False, "error": error}), attempts=1)
    assert grade.reason is NoGradeReason.TIMEOUT


def test_a_judge_that_failed_has_given_no_grade() -> None:
    printed = "JUDGE ERROR: 529 overloaded"
    execution = parse_execution({"success": True, "result": 0, "stdout": printed})
    assert judge_execution(execution, attempts=1).reason is NoGradeReason.JUDGE_ERROR
