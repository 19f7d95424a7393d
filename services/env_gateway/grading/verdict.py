"""What a verifier's run is worth: a reward, or no grade and why. Pure.

A grade that is not known is never 0: it would push the policy away from what may have been right.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from services.env_gateway.grading.authorship import NOBODY, Authorship
from services.env_gateway.grading.printed_results import (
    CHECK_CHARS,
    CHECKS_KEPT,
    Printed,
    read_printed,
)
from services.env_gateway.ports import Execution, Report

# Of rewards, either way: beyond it learners refuse them, lest a mean or a variance overflows.
MAX_REWARD = 1e6
_STDOUT_BYTES = 64 * 2**10


class Reason(StrEnum):
    EXECUTION_FAILED = "execution_failed"
    JUDGE_ERROR = "judge_error"
    INSTANCE_LOST = "instance_lost"
    TIMEOUT = "timeout"
    NO_VERIFIER = "no_verifier"
    TAINTED = "tainted"


@dataclass(frozen=True, slots=True)
class Grade:
    """Either `reward` is known or `reason` says why it is not. `suspicion` shows the results among
    what the verifier printed that the policy may have written: they count for nothing."""

    reward: float | None = None
    reason: Reason | None = None
    detail: str = ""
    partial_reward: float | None = None
    checks_passed: tuple[str, ...] = ()
    checks_failed: tuple[str, ...] = ()
    stdout: str = ""
    attempts: int = 1
    suspicion: str = ""

    @property
    def known(self) -> bool:
        return self.reward is not None


def no_grade(reason: Reason, detail: str, *, attempts: int = 0) -> Grade:
    return Grade(reason=reason, detail=detail, attempts=attempts)


def judge(execution: Execution, *, attempts: int, authorship: Authorship = NOBODY) -> Grade:
    """Turn a verifier's run into a grade. A result of None is no grade, never a pass. The partial
    reward is as told: checks that pass by themselves count.

    What was printed is read only where the verifier did not return its checks, and without what the
    policy may have written by `authorship`.
    """
    printed = _told(execution, authorship)
    reason, detail = _failure(execution, printed)
    reward = None if reason else float(execution.result)
    share = partial_reward(printed.passed, printed.failed) if printed.countable else None
    return Grade(
        reward=reward,
        reason=reason,
        detail=detail,
        partial_reward=share if reward is None else allowed(share, reward),
        checks_passed=printed.passed,
        checks_failed=printed.failed,
        stdout=_bounded(execution.stdout),
        attempts=attempts if execution.ran else 0,
        suspicion="\n".join(printed.doubts) if reward == 0 else "",
    )


def partial_reward(
    passed: Collection[str], failed: Collection[str], *, free: Collection[str] = ()
) -> float | None:
    """Passed checks as a share of all but the `free` ones; None when there are no others."""
    earned = sum(check not in free for check in passed)
    total = earned + sum(check not in free for check in failed)
    return earned / total if total else None


def allowed(share: float | None, reward: float) -> float | None:
    """The share as far as the returned value allows it: a zero says that not all has passed, and
    any other reward is what was earned."""
    if share is None or reward < 0 or (reward == 0 and share == 1):
        return None
    return min(share, reward) if reward else share


def reported(value: object) -> tuple[object, Report | None]:
    """The score that a verifier returned, and its checks where it returned them with it:
    `{"score": 0, "passed": ["one"], "failed": ["another"]}`."""
    match value:
        case {"score": score, "passed": list() | tuple(), "failed": list() | tuple()}:
            fields = cast("dict[str, list[object]]", value)
            return score, Report(_checks(fields["passed"]), _checks(fields["failed"]))
        case {"score": score}:
            return score, None
        case _:
            return value, None


def _told(execution: Execution, authorship: Authorship) -> Printed:
    """What the verifier told of its checks, by its report where there is one."""
    if execution.report is None:
        return read_printed(execution.stdout, authorship, cut=execution.cut)
    return Printed(None, execution.report.passed, execution.report.failed, countable=True)


def _failure(execution: Execution, printed: Printed) -> tuple[Reason | None, str]:
    if execution.timed_out:
        return Reason.TIMEOUT, execution.error or "the verifier took too long"
    if execution.instance_lost:
        return Reason.INSTANCE_LOST, execution.error or "the instance is gone"
    if execution.error is not None:
        return Reason.EXECUTION_FAILED, execution.error
    if not _is_reward(execution.result):
        shown = repr(execution.result)[:100]
        told = f"the verifier returned {shown}; a reward is a number from {-MAX_REWARD:g} to"
        return Reason.EXECUTION_FAILED, f"{told} {MAX_REWARD:g}, and 1 is a pass"
    if printed.judge_error is not None and execution.result == 0:
        return Reason.JUDGE_ERROR, printed.judge_error
    return None, ""


def _checks(items: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(item)[:CHECK_CHARS] for item in items[:CHECKS_KEPT])


def _is_reward(result: object) -> bool:
    # An int may be one that no float can hold; NaN is within no bounds.
    return isinstance(result, bool | int | float) and -MAX_REWARD <= result <= MAX_REWARD


def _bounded(stdout: str) -> str:
    data = stdout.encode("utf-8", "replace")
    if len(data) <= _STDOUT_BYTES:
        return data.decode()
    return data[:_STDOUT_BYTES].decode("utf-8", "ignore")
