"""Grades from verifier runs: a reward, or the reason for having none. Pure.

An unknown grade is never 0: that would push the policy away from a solution that may have
been right."""

from collections.abc import Collection

from services.common.domain.attempts import Grade, NoGradeReason
from services.env_gateway.grading.authorship import NO_AUTHOR, Authorship
from services.env_gateway.grading.printed_results import PrintedResults, read_printed
from services.env_gateway.ports import Execution

# Largest absolute reward: learners refuse larger ones, which could overflow a mean or a variance.
MAX_REWARD = 1e6
_STDOUT_BYTES = 64 * 2**10


def no_grade(reason: NoGradeReason, detail: str) -> Grade:
    return Grade(reason=reason, detail=detail, attempts=0)


def judge_execution(
    execution: Execution, *, attempts: int, authorship: Authorship = NO_AUTHOR
) -> Grade:
    """Turn a verifier's run into a grade. A result of None is no grade, never a pass.

    Printed output is read only if the verifier did not return its checks, and without
    anything that the policy may have written by `authorship`."""
    printed = _read_results(execution, authorship)
    reason, detail = _failure_reason(execution, printed)
    reward = None if reason else float(execution.result)
    return Grade(
        reward=reward,
        reason=reason,
        detail=detail,
        partial_reward=_reported_partial_reward(printed, reward),
        checks_passed=printed.passed,
        checks_failed=printed.failed,
        stdout=_bounded_stdout(execution.stdout),
        attempts=attempts if execution.ran else 0,
        suspicion="\n".join(printed.doubts) if reward == 0 else "",
    )


def _reported_partial_reward(printed: PrintedResults, reward: float | None) -> float | None:
    """Return the partial reward as reported: checks that pass on the untouched state count."""
    share = compute_partial_reward(printed.passed, printed.failed) if printed.countable else None
    return share if reward is None else cap_partial_reward(share, reward)


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


def _read_results(execution: Execution, authorship: Authorship) -> PrintedResults:
    """Return the verifier's checks: from its report if there is one, else from its output."""
    if execution.report is None:
        return read_printed(execution.stdout, authorship, cut=execution.cut)
    return PrintedResults(None, execution.report.passed, execution.report.failed, countable=True)


def _failure_reason(
    execution: Execution, printed: PrintedResults
) -> tuple[NoGradeReason | None, str]:
    if execution.timed_out:
        return NoGradeReason.TIMEOUT, execution.error or "the verifier took too long"
    if execution.instance_lost:
        return NoGradeReason.INSTANCE_LOST, execution.error or "the instance is gone"
    if execution.error is not None:
        return NoGradeReason.EXECUTION_FAILED, execution.error
    if not _is_reward(execution.result):
        shown = repr(execution.result)[:100]
        message = f"the verifier returned {shown}; a reward is a number from {-MAX_REWARD:g} to"
        return NoGradeReason.EXECUTION_FAILED, f"{message} {MAX_REWARD:g}, and 1 is a pass"
    if printed.judge_error is not None and execution.result == 0:
        return NoGradeReason.JUDGE_ERROR, printed.judge_error
    return None, ""


def _is_reward(result: object) -> bool:
    # An int may exceed any float; NaN is within no bounds.
    return isinstance(result, bool | int | float) and -MAX_REWARD <= result <= MAX_REWARD


def _bounded_stdout(stdout: str) -> str:
    data = stdout.encode("utf-8", "replace")
    if len(data) <= _STDOUT_BYTES:
        return data.decode()
    return data[:_STDOUT_BYTES].decode("utf-8", "ignore")
