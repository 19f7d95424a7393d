"""Output of verifiers, of any length and kind: read in time and to its end."""

import json
import time

import pytest

from services.common.domain.attempts import NoGradeReason
from services.env_gateway.grading.authorship import authorship_of
from services.env_gateway.grading.policy_writings import Phrase, PolicyWritings
from services.env_gateway.grading.verdict import judge_execution
from services.env_gateway.ports import Execution, Submission
from services.env_gateway.tasks.task_format import Task
from services.env_gateway.verify.worker import Bounded
from tests.support.fake_gateway import printed_checks

OPENED = ">>> ERROR_ACCUMULATOR >>>\n"


@pytest.mark.parametrize(
    "stdout",
    [
        "\n" * 2**18,
        "\r\n \t" * 2**16,
        OPENED * 10_000,
        (OPENED + "x\n<<< SUCCESS_ACCUMULATOR <<<\n") * 5_000,
        "App x" + ": 0 " * 2**16,
        "\n" * 10_000_000,
    ],
    ids=["lines", "blanks", "openers", "crossed", "apps", "megabytes"],
)
def test_no_output_holds_the_gateway_up(stdout: str) -> None:
    started = time.thread_time()
    assert judge_execution(Execution(result=0, stdout=stdout), attempts=1).reward == 0.0
    assert time.thread_time() - started < 2.0


def test_checks_are_read_as_before() -> None:
    stdout = (
        "noise\n>>> SUCCESS_ACCUMULATOR >>>\n['a']\n<<< SUCCESS_ACCUMULATOR <<<\n"
        ">>> SUCCESS_ACCUMULATOR >>>\n['a', 'b']\n<<< SUCCESS_ACCUMULATOR <<<\n"
        ">>> ERROR_ACCUMULATOR >>>\n>>> SUCCESS_ACCUMULATOR >>>\nc\n<<< ERROR_ACCUMULATOR <<<\n"
        ">>> ERROR_ACCUMULATOR >>>\nnever closed"
    )
    assert printed_checks(stdout) == (("a", "b"), (">>> SUCCESS_ACCUMULATOR >>>", "c"))


@pytest.mark.parametrize("before", ["", "some text\n", "\n\n  \t"])
def test_a_judge_that_failed_is_found_at_the_start_of_any_line(before: str) -> None:
    grade = judge_execution(
        Execution(result=0, stdout=f"{before}JUDGE ERROR: no\nmore"), attempts=1
    )
    assert (grade.reward, grade.reason, grade.detail) == (None, NoGradeReason.JUDGE_ERROR, "no")


def test_the_end_of_what_a_verifier_prints_is_kept() -> None:
    """The checks, and the failure of a judge, are printed last."""
    printed = Bounded()
    for line in range(100_000):
        printed.write(f"line {line}\n")
    printed.write("JUDGE ERROR: no answer\n")
    kept = printed.getvalue()
    assert len(kept) < 2**18 + 100
    assert kept.startswith("line 0\n") and kept.endswith("line 99999\nJUDGE ERROR: no answer\n")
    assert (
        judge_execution(Execution(result=0, stdout=kept), attempts=1).reason
        is NoGradeReason.JUDGE_ERROR
    )


def test_one_long_text_is_kept_at_both_ends() -> None:
    printed = Bounded()
    assert printed.write("a" * 2**20 + "b" * 2**20) == 2**21
    kept = printed.getvalue()
    assert kept.startswith("aaa") and kept.endswith("bbb") and len(kept) < 2**18 + 100


def test_of_a_longer_output_only_the_end_is_searched_for_checks() -> None:
    checks = f"{OPENED}['a']\n<<< ERROR_ACCUMULATOR <<<\n"
    assert judge_execution(Execution(result=0, stdout=checks), attempts=1).checks_failed == ("a",)
    for stdout, failed in ((checks + "x" * 2**19, ()), ("x" * 2**19 + "\n" + checks, ("a",))):
        grade = judge_execution(Execution(result=0, stdout=stdout), attempts=1)
        assert (grade.checks_failed, grade.partial_reward) == (failed, None)


@pytest.mark.parametrize("items", [["x"] * 4097, ["x" * 2**15]])
def test_a_list_that_takes_long_to_parse_is_read_by_its_lines(items: list[str]) -> None:
    stdout = f"{OPENED}{items}\n<<< ERROR_ACCUMULATOR <<<\n"
    grade = judge_execution(Execution(result=0, stdout=stdout), attempts=1)
    assert grade.checks_failed == (str(items)[:500],)
    assert grade.partial_reward is None


def test_of_a_conversation_that_is_too_long_every_word_is_the_policys() -> None:
    task = Task(key="t", prompt="p", env_key="e")
    for messages, too_many in ((10, False), (2**17, True)):
        reported = json.dumps([{"role": "tool"}] * messages)
        found = authorship_of(PolicyWritings(), Submission(task, None, reported))
        assert found.explains_phrase(Phrase.FAILED) is too_many
