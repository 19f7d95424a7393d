"""Grades from verifier runs: a reward, or the reason for having none. Pure.

An unknown grade is never 0: that would push the policy away from a solution that may have
been right."""

import re
from collections.abc import Collection

from flotilla_common.domain.attempts import MAX_REWARD, Grade, NoGradeReason
from flotilla_env_gateway.grading.printed_checks import read_printed_checks
from flotilla_env_gateway.ports import Execution
from flotilla_env_gateway.verify.check_report import CHECK_CHARS, is_reward, read_named_rewards

_STDOUT_BYTES = 64 * 2**10
_JUDGE_ERROR = re.compile(r"^[^\S\n]*JUDGE ERROR:(?P<detail>.*)$", re.MULTILINE)
_SUSPICION_CHARS = 200


def no_grade(reason: NoGradeReason, detail: str) -> Grade:
    return Grade(reason=reason, detail=detail, attempts=0)


def judge_execution(execution: Execution, *, attempts: int, phrase_passed: bool = False) -> Grade:
    """Turn a verifier's run into a grade, by the value that it returned. A result of None is no
    grade, never a pass.

    Of its output only the phrase of a failed judge matters, and only if it returned no checks and
    the phrase was not `phrase_passed` in the episode: else it may be the policy's."""
    checks = execution.report or read_printed_checks(execution.stdout)
    judge = _find_judge_error(execution)
    reason, detail = _failure_reason(execution, None if phrase_passed else judge)
    reward = None if reason else float(execution.result)
    named: dict[str, float] = {}
    if reason is None:
        try:
            named = read_named_rewards(execution.rewards)
        except (ValueError, TypeError) as error:
            reason, reward = NoGradeReason.EXECUTION_FAILED, None
            detail = f"the verifier returned named rewards that are none: {error}"
    return Grade(
        reward=reward,
        reason=reason,
        detail=detail,
        partial_reward=_returned_partial_reward(execution, reward),
        checks_passed=checks.passed,
        checks_failed=checks.failed,
        stdout=_bounded_stdout(execution.stdout),
        attempts=attempts if execution.ran else 0,
        suspicion=judge[0].strip()[:_SUSPICION_CHARS] if judge and not reason else "",
        verifier_fault=reason is NoGradeReason.EXECUTION_FAILED and _is_own_fault(execution),
        named_rewards=named,
    )


def _returned_partial_reward(execution: Execution, reward: float | None) -> float | None:
    """Return the share of passed checks, of those that the verifier returned."""
    report = execution.report
    if report is None or reward is None:
        return None
    return cap_partial_reward(compute_partial_reward(report.passed, report.failed), reward)


def compute_partial_reward(
    passed: Collection[str], failed: Collection[str], *, free: Collection[str] = ()
) -> float | None:
    """Return the passed checks as a share of all but the `free` ones, or None if there are no
    others."""
    earned = sum(check not in free for check in passed)
    total = earned + sum(check not in free for check in failed)
    return earned / total if total else None


def cap_partial_reward(share: float | None, reward: float) -> float | None:
    """Limit the share to the returned value: a zero means that not all checks passed, and any
    other reward caps it."""
    if share is None or reward < 0 or (reward == 0 and share == 1):
        return None
    return min(share, reward) if reward else share


def _find_judge_error(execution: Execution) -> re.Match[str] | None:
    """Find the phrase of a failed judge where it makes a zero meaningless."""
    if execution.report is not None or execution.result != 0:
        return None
    return _JUDGE_ERROR.search(execution.stdout) if "JUDGE ERROR:" in execution.stdout else None


def _failure_reason(
    execution: Execution, judge: re.Match[str] | None
) -> tuple[NoGradeReason | None, str]:
    if execution.timed_out:
        return NoGradeReason.TIMEOUT, execution.error or "the verifier took too long"
    if execution.instance_lost:
        return NoGradeReason.INSTANCE_LOST, execution.error or "the instance is gone"
    if execution.error is not None:
        return NoGradeReason.EXECUTION_FAILED, execution.error
    if not is_reward(execution.result):
        shown = repr(execution.result)[:100]
        message = f"the verifier returned {shown}; a reward is a number from {-MAX_REWARD:g} to"
        return NoGradeReason.EXECUTION_FAILED, f"{message} {MAX_REWARD:g}, and 1 is a pass"
    if judge is not None:
        return NoGradeReason.JUDGE_ERROR, judge["detail"].strip()[:CHECK_CHARS]
    return None, ""


def _is_own_fault(execution: Execution) -> bool:
    return execution.raised or execution.error is None


def _bounded_stdout(stdout: str) -> str:
    data = stdout.encode("utf-8", "replace")
    if len(data) <= _STDOUT_BYTES:
        return data.decode()
    return data[:_STDOUT_BYTES].decode("utf-8", "ignore")
