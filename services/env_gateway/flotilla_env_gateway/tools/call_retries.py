"""Retry policy of failed tool calls. No I/O.

The rule is by phase and class of tool: a request that was certainly not executed may always
be repeated; one that may have been executed only if the tool is read-only or idempotent. An
error reported by the tool itself is an answer and is never repeated."""

from dataclasses import dataclass

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.ports import BackendError


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Decision on a failed attempt: retry after `wait_s`, or give up with `outcome` if that is
    None."""

    outcome: ToolOutcome
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
    took_s: float,
    backoff: Backoff,
    budget: RetryBudget,
) -> RetryDecision:
    """Judge an attempt of a tool call that failed after `took_s`, with `remaining_s` left until the
    call's deadline. A retry that would have less time than that is not begun: cut off, it would
    leave unknown whether it was executed.

    `unknown`: this attempt or one before it may have changed something.
    """
    outcome = _outcome_of(error, unknown=unknown)
    safe = error.delivered is False or repeatable
    if error.lost or error.invalid or error.bad_arguments or not safe:
        return RetryDecision(outcome)
    wait_s = backoff.next_wait_s(error.retry_after_s)
    if wait_s + took_s >= remaining_s:
        return RetryDecision(outcome)
    throttled = error.kind == "throttled"
    if not throttled and not budget.try_spend():
        return RetryDecision(outcome)
    return RetryDecision(outcome, wait_s)


def _outcome_of(error: BackendError, *, unknown: bool) -> ToolOutcome:
    """Return how a call ends that failed with `error` and is not tried again. A failure of the
    environment is never for the policy to read: it costs the episode."""
    if unknown:
        return ToolOutcome.OUTCOME_UNKNOWN
    if error.bad_arguments:
        return ToolOutcome.BAD_ARGUMENTS
    if error.lost:
        return ToolOutcome.SESSION_LOST
    if error.kind == "timeout" and error.delivered is None:
        return ToolOutcome.DEADLINE
    if error.kind == "too_large" and error.delivered is False:
        return ToolOutcome.NOT_EXECUTED
    return ToolOutcome.SESSION_LOST
