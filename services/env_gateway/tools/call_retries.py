"""Retry policy of failed tool calls. No I/O.

The rule is by phase and class of tool: a request that was certainly not executed may always
be repeated; one that may have been executed only if the tool is read-only or idempotent. An
error reported by the tool itself is an answer and is never repeated."""

from dataclasses import dataclass
from enum import StrEnum

from services.env_gateway.limits.backoff import Backoff
from services.env_gateway.ports import BackendError


class CallVerdict(StrEnum):
    """Meaning of a failure for the call, if it is not repeated."""

    NOT_EXECUTED = "not_executed"
    OUTCOME_UNKNOWN = "outcome_unknown"
    DEADLINE = "deadline"
    SESSION_LOST = "session_lost"
    BAD_ARGUMENTS = "bad_arguments"


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Decision on a failed attempt: retry after `wait_s`, or give up with `verdict` if that is
    None."""

    verdict: CallVerdict
    wait_s: float | None = None


class RetryBudget:
    """Retries as a share of first attempts, so that retrying cannot multiply an overload.

    Each first attempt deposits `ratio`; a retry spends 1; at most `cap` are saved up.
    """

    def __init__(self, *, ratio: float, cap: float) -> None:
        self._ratio = ratio
        self._cap = cap
        self._tokens = cap

    @property
    def tokens(self) -> float:
        return self._tokens

    def deposit(self) -> None:
        self._tokens = min(self._cap, self._tokens + self._ratio)

    def try_spend(self) -> bool:
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def decide_retry(
    error: BackendError,
    *,
    repeatable: bool,
    unknown: bool,
    remaining_s: float,
    backoff: Backoff,
    budget: RetryBudget,
) -> RetryDecision:
    """Judge one failed attempt of a tool call with `remaining_s` left until its deadline.

    `unknown`: this attempt or one before it may have changed something.
    """
    verdict = _verdict_of(error, unknown=unknown)
    safe = error.delivered is False or repeatable
    if error.lost or error.invalid or error.bad_arguments or not safe:
        return RetryDecision(verdict)
    wait_s = backoff.next_wait_s(error.retry_after_s)
    if wait_s >= remaining_s:
        return RetryDecision(verdict)
    throttled = error.kind == "throttled"
    if not throttled and not budget.try_spend():
        return RetryDecision(verdict)
    return RetryDecision(verdict, wait_s)


def _verdict_of(error: BackendError, *, unknown: bool) -> CallVerdict:
    if unknown:
        return CallVerdict.OUTCOME_UNKNOWN
    if error.bad_arguments:
        return CallVerdict.BAD_ARGUMENTS
    if error.lost:
        return CallVerdict.SESSION_LOST
    if error.kind == "timeout":
        return CallVerdict.DEADLINE
    return CallVerdict.NOT_EXECUTED
