"""Detection of environments and tasks that the env_gateway refuses, as opposed to failing ones,
and of runs in which nothing ever works."""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from flotilla_common.domain.attempts import FailureKind
from flotilla_common.domain.trajectory import Trajectory

# Tasks that must be refused before an environment of that size counts as refused, and tasks that
# must fail for one reason before it counts as broken.
_TASKS, _FAILED_TASKS = 8, 3
# Faults of an environment, its verifiers or the engine; others are our own, and may pass.
_CONCLUSIVE = (FailureKind.ENV_LOST, FailureKind.NO_GRADE, FailureKind.ENGINE_ERROR)
# The gateway itself is unavailable, or others have all places.
_TRANSIENT = (
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "DRAINING", "QUEUE_FULL", "EPISODE_LOST"),
    *("throttled", "no_place"),
)
# Ids, digests and seconds, which differ from try to try.
_NUMBERS = re.compile(r"[0-9a-f]{8,}|\d+")


class Refusal(StrEnum):
    """Reasons of `OpenEpisode` that do not change on a retry; a rollout worker starts the
    detail of a failed try with them."""

    UNKNOWN_ENVIRONMENT = "UNKNOWN_ENVIRONMENT"
    BAD_TASK = "BAD_TASK"


def common_refusal(tries: Sequence[Trajectory]) -> tuple[Refusal, str] | None:
    """Return why the gateway refused all of these tries, with its message; None if it did not."""
    found = [_parse_refusal(trajectory) for trajectory in tries]
    if not found or found[0] is None or any(other != found[0] for other in found):
        return None
    return found[0], tries[-1].detail


class RefusalHistory:
    """Environments that opened an episode in this run, and those that were refused."""

    def __init__(self, sizes: Mapping[str, int], opened: Iterable[str]) -> None:
        """Create it; `sizes` are numbers of tasks, `opened` the environments with an
        episode."""
        self._sizes = sizes
        self._opened = set(opened)
        # Time of an environment's first refusal, and its refused tasks.
        self._refused: dict[str, tuple[float, set[str]]] = {}
        # True once anything was graded; then, by environment, the time of the first group that
        # failed for this one reason, and the tasks of all such groups.
        self._worked = bool(self._opened)
        self._failed: dict[str, tuple[float, str, set[str]]] = {}

    def note_attempt(self, env: str, trajectory: Trajectory) -> None:
        """Record what a try shows about its environment."""
        if trajectory.reward is not None or trajectory.counts.open_s or trajectory.counts.turns:
            self._opened.add(env)
            self._refused.pop(env, None)
        if trajectory.reward is not None:
            self._worked = True

    def note_refused(
        self, env: str, task: str, refusal: Refusal, detail: str, *, at: float, open_since: float
    ) -> str:
        """Record that a task was refused at `at`; return why the run cannot continue, or "".

        A group in progress since before the first refusal, `open_since`, may still show that the
        environment has good tasks too."""
        if env in self._opened:
            return ""
        first, tasks = self._refused.setdefault(env, (at, set()))
        tasks.add(task)
        if refusal is Refusal.UNKNOWN_ENVIRONMENT:
            return (
                f"env_gateway: nothing serves environment {env!r}, and no episode of it was ever"
                f" opened in this run: {detail}"
            )
        if len(tasks) < min(_TASKS, self._sizes.get(env, _TASKS)) or open_since <= first:
            return ""
        return (
            f"env_gateway: refuses the tasks of environment {env!r}, and no episode of it was ever"
            f" opened in this run: its reason for {task!r} is {detail}"
        )

    def note_failed(
        self, env: str, task: str, tries: Sequence[Trajectory], *, at: float, open_since: float
    ) -> str:
        """Record that every try of a group failed, the last at `at`; return why the run cannot
        continue, or "". `open_since`: see `note_refused`."""
        reason = _same_reason(tries)
        if self._worked or not reason:
            return ""
        known = self._failed.get(env)
        if known is None or known[1] != reason:
            known = self._failed[env] = (at, reason, set())
        first, _, tasks = known
        tasks.add(task)
        if len(tasks) < min(_FAILED_TASKS, self._sizes.get(env, 1)) or open_since <= first:
            return ""
        last = tries[-1]
        what = f"{last.failure}: {last.no_grade}: " if last.no_grade else f"{last.failure}: "
        return (
            f"no attempt of this run was ever graded, and all tries at {len(tasks)} tasks of"
            f" environment {env!r} failed for the same reason: {what}{last.detail}"
        )


def _same_reason(tries: Sequence[Trajectory]) -> str:
    """Return the reason why all of these failed; "" if there are several or none."""
    reasons = {_failure_reason(each) for each in tries}
    return reasons.pop() if len(reasons) == 1 else ""


def _failure_reason(trajectory: Trajectory) -> str:
    passing = trajectory.detail.partition(":")[0] in _TRANSIENT
    if trajectory.failure not in _CONCLUSIVE or passing or not trajectory.detail:
        return ""
    detail = _NUMBERS.sub("#", trajectory.detail)
    return f"{trajectory.failure} {trajectory.no_grade} {detail}"


def _parse_refusal(trajectory: Trajectory) -> Refusal | None:
    if trajectory.failure is not FailureKind.ENV_LOST:
        return None
    reason = trajectory.detail.partition(":")[0]
    return Refusal(reason) if reason in Refusal.__members__ else None
