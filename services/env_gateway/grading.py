"""What a verifier's run is worth: a reward, or no grade and why. Pure.

A grade that is not known is never 0: it would push the policy away from what may have been right.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from services.common.parsing import Limits, parse_literal
from services.env_gateway.ports import Execution

_STDOUT_BYTES = 64 * 2**10
_CHECKS_KEPT = 200
# 200 passed and 200 failed checks fit into one message, whatever their characters.
_CHECK_CHARS = 500
# Of a line of a verifier that is shown.
_OPENED = re.compile(r">>> (?P<kind>ERROR|SUCCESS)_ACCUMULATOR >>>\n")
# Of a longer output only this much, its end, is searched for checks.
_SEARCHED_CHARS = 2**19
# A longer list of checks is read by its lines: Python takes milliseconds for each KiB.
_LIST_LIMITS = Limits(bytes=2**15, values=4096)
_APP = re.compile(r"^(?P<name>App \S.*?): (?P<passed>[01])[ \t\r]*$", re.MULTILINE)
_JUDGE_ERROR = re.compile(r"^[^\S\n]*JUDGE ERROR:(?P<detail>.*)$", re.MULTILINE)


class Reason(StrEnum):
    EXECUTION_FAILED = "execution_failed"
    JUDGE_ERROR = "judge_error"
    INSTANCE_LOST = "instance_lost"
    TIMEOUT = "timeout"
    NO_VERIFIER = "no_verifier"
    TAINTED = "tainted"


@dataclass(frozen=True, slots=True)
class Grade:
    """Either `reward` is known or `reason` says why it is not."""

    reward: float | None = None
    reason: Reason | None = None
    detail: str = ""
    partial_reward: float | None = None
    checks_passed: tuple[str, ...] = ()
    checks_failed: tuple[str, ...] = ()
    stdout: str = ""
    attempts: int = 1

    @property
    def known(self) -> bool:
        return self.reward is not None


def no_grade(reason: Reason, detail: str, *, attempts: int = 0) -> Grade:
    return Grade(reason=reason, detail=detail, attempts=attempts)


def judge(execution: Execution, *, attempts: int) -> Grade:
    """Turn a verifier's run into a grade. A result of None is no grade, never a pass. The partial
    reward is as printed: checks that pass by themselves count."""
    passed, failed = parse_checks(execution.stdout)
    reason, detail = _failure(execution)
    return Grade(
        reward=None if reason else float(execution.result),
        reason=reason,
        detail=detail,
        partial_reward=partial_reward(passed, failed),
        checks_passed=passed,
        checks_failed=failed,
        stdout=_bounded(execution.stdout),
        attempts=attempts if execution.ran else 0,
    )


def worth_repeating(execution: Execution) -> bool:
    """Whether another run of the verifier may end better."""
    return execution.retryable or (
        execution.error is None and _JUDGE_ERROR.search(execution.stdout) is not None
    )


def parse_checks(stdout: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The checks that a verifier printed as passed and as failed; the last print of each counts.

    A verifier over several apps prints `App NAME: 0` or `App NAME: 1` for each, and then these are
    its checks; others print lists of what passed and what failed.
    """
    stdout = stdout[-_SEARCHED_CHARS:]
    if apps := {match["name"]: match["passed"] == "1" for match in _APP.finditer(stdout)}:
        return _named(apps, passed=True), _named(apps, passed=False)
    last = dict(_accumulators(stdout))
    passed, failed = (_checks(last[kind]) if kind in last else () for kind in ("SUCCESS", "ERROR"))
    return passed, failed


def partial_reward(
    passed: Collection[str], failed: Collection[str], *, free: Collection[str] = ()
) -> float | None:
    """Passed checks as a share of all but the `free` ones; None when there are no others."""
    earned = sum(check not in free for check in passed)
    total = earned + sum(check not in free for check in failed)
    return earned / total if total else None


def _failure(execution: Execution) -> tuple[Reason | None, str]:
    if execution.timed_out:
        return Reason.TIMEOUT, execution.error or "the verifier took too long"
    if execution.instance_lost:
        return Reason.INSTANCE_LOST, execution.error or "the instance is gone"
    if execution.error is not None:
        return Reason.EXECUTION_FAILED, execution.error
    if match := _JUDGE_ERROR.search(execution.stdout):
        return Reason.JUDGE_ERROR, match["detail"].strip()[:_CHECK_CHARS]
    if not _is_finite(execution.result):
        shown = repr(execution.result)[:100]
        return Reason.EXECUTION_FAILED, f"the verifier returned {shown}, not a finite number"
    return None, ""


def _is_finite(result: object) -> bool:
    try:
        return isinstance(result, bool | int | float) and math.isfinite(result)
    except OverflowError:  # an int that no float can hold
        return False


def _named(apps: Mapping[str, bool], *, passed: bool) -> tuple[str, ...]:
    names = [name[:_CHECK_CHARS] for name, value in apps.items() if value is passed]
    return tuple(names[:_CHECKS_KEPT])


def _accumulators(stdout: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each. In one pass: a pattern for the whole would search the rest anew for
    each that is never closed."""
    at = 0
    unclosed: set[str] = set()
    while len(unclosed) < 2 and (opened := _OPENED.search(stdout, at)) is not None:
        at, kind = opened.end(), opened["kind"]
        closing = f"\n<<< {kind}_ACCUMULATOR <<<"
        end = -1 if kind in unclosed else stdout.find(closing, at)
        if end < 0:
            unclosed.add(kind)
        else:
            yield kind, stdout[at:end]
            at = end + len(closing)


def _checks(body: str) -> tuple[str, ...]:
    try:
        return _told(parse_literal(body.strip(), _LIST_LIMITS))
    except ValueError:
        # No literal, or one with an integer that Python does not write out.
        return _told(body.splitlines())


def _told(value: object) -> tuple[str, ...]:
    items = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
    return tuple(str(item)[:_CHECK_CHARS] for item in items[:_CHECKS_KEPT])


def _bounded(stdout: str) -> str:
    data = stdout.encode("utf-8", "replace")
    if len(data) <= _STDOUT_BYTES:
        return data.decode()
    return data[:_STDOUT_BYTES].decode("utf-8", "ignore")
