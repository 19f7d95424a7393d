"""Environments and tasks that the env_gateway will not have, told from those that merely fail."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from services.learner.trajectory import Trajectory
from services.learner.types import FailureKind

# Tasks that must be refused before an environment counts as refused, where it has so many.
_TASKS = 8


class Refusal(StrEnum):
    """The reasons of `OpenEpisode` that trying again does not change; a rollout worker begins
    the detail of a failed try with them."""

    UNKNOWN_ENVIRONMENT = "UNKNOWN_ENVIRONMENT"
    BAD_TASK = "BAD_TASK"


def refusal_of(tries: Sequence[Trajectory]) -> tuple[Refusal, str] | None:
    """Why the gateway refused every one of these tries, with its words; None when it did not."""
    found = [_refusal(trajectory) for trajectory in tries]
    if not found or found[0] is None or any(other != found[0] for other in found):
        return None
    return found[0], tries[-1].detail


class Refusals:
    """Which environments ever opened an episode in this run, and who was refused."""

    def __init__(self, sizes: Mapping[str, int], opened: Iterable[str]) -> None:
        """`sizes` are numbers of tasks; `opened` are the environments that had an episode."""
        self._sizes = sizes
        self._opened = set(opened)
        # When the first task of an environment was refused, and which ones were.
        self._refused: dict[str, tuple[float, set[str]]] = {}

    def tried(self, env: str, trajectory: Trajectory) -> None:
        """Note what a try says about its environment."""
        if trajectory.reward is not None or trajectory.counts.open_s or trajectory.counts.turns:
            self._opened.add(env)
            self._refused.pop(env, None)

    def refused(
        self, env: str, task: str, refusal: Refusal, detail: str, *, at: float, open_since: float
    ) -> str:
        """A task was refused at `at`; returns why the run cannot go on, or nothing.

        A group that is at work since before the first refusal, `open_since`, may still show that
        the environment has good tasks too.
        """
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
            f" opened in this run: of {task!r} it says {detail}"
        )


def _refusal(trajectory: Trajectory) -> Refusal | None:
    if trajectory.failure is not FailureKind.ENV_LOST:
        return None
    reason = trajectory.detail.partition(":")[0]
    return Refusal(reason) if reason in Refusal.__members__ else None
