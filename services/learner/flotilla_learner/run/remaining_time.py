"""Estimate of the seconds until a run's end. Pure: the caller passes times and counts."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.run.eval_report import Moment
from flotilla_learner.sampling.eval_sets import EvalSet

# Steps over which the pace is averaged; those that are not there yet count as the first estimate.
_RECENT = 8


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run has to do: its steps, the attempts of each, and the attempts of its evaluations by
    their moment, of which those during training come every `every` steps. The first `warm_steps` of
    its `steps` imitate."""

    steps: int
    attempts_per_step: int
    eval_attempts: Mapping[str, int]
    every: int
    warm_steps: int = 0

    def eval_attempts_at(self, step: int) -> int:
        """Return the attempts of the evaluation that follows this step."""
        if step in (0, self.steps):
            return self.eval_attempts["before" if step == 0 else "after"]
        done = step - self.warm_steps
        due = done == 0 or (done > 0 and self.every and done % self.every == 0)
        return self.eval_attempts["during"] if due else 0

    def eval_attempts_after(self, step: int) -> int:
        """Return the attempts of all evaluations that begin once this step is done."""
        return sum(self.eval_attempts_at(each) for each in range(step, self.steps + 1))


def plan_of(config: LearnerConfig, eval_sets: Sequence[EvalSet]) -> RunPlan:
    """Return what a run of this configuration has to do."""
    moments: tuple[Moment, ...] = ("before", "during", "after")
    counts = {
        moment: sum(
            len(chosen.tasks) * chosen.config.attempts
            for chosen in eval_sets
            if moment in chosen.config.when
        )
        for moment in moments
    }
    per_step = config.groups_per_step * config.group_size
    every, warm_steps = config.eval.every, config.warm_steps
    return RunPlan(config.total_steps, per_step, counts, every, warm_steps)


@dataclass(slots=True)
class RemainingTime:
    """Estimator that is told the end of each step of this start of the run.

    A step whose sampling an evaluation shares says nothing about the others: what it takes longer
    than they do is the evaluation's. The first steps of a start train on what was sampled ahead, so
    the rate at which attempts arrived counts too."""

    plan: RunPlan
    _steps: deque[float] = field(default_factory=lambda: deque[float](maxlen=_RECENT))
    _last: tuple[int, float] | None = None
    # Seconds of an attempt, until the first step's end, and of an evaluation's.
    _attempt_s: float = 0.0
    _eval_attempt_s: float = 0.0

    def end_step(self, step: int, now: float, since: float | None, received: int) -> float | None:
        """Return the seconds left at the end of a step, `now`; None before this start's second
        that is no step of a warm start, which tell nothing about the others.

        `received` is the number of attempts that have arrived since `since`, the first one's
        time."""
        if step <= self.plan.warm_steps:
            return None
        last, self._last = self._last, (step, now)
        if last is None:
            if since is not None:
                self._attempt_s = self._eval_attempt_s = (now - since) / max(1, received)
            return None
        taken = now - last[1]
        beside = self.plan.eval_attempts_at(step - 1)
        if beside:
            self._eval_attempt_s = max(0.0, taken - self._step_s) / beside
        else:
            self._steps.append(taken)
        waiting = self.plan.eval_attempts_after(step)
        return self._step_s * (self.plan.steps - step) + self._eval_attempt_s * waiting

    @property
    def _step_s(self) -> float:
        first = self._attempt_s * self.plan.attempts_per_step
        if not self._steps:
            return first
        first = max(first, sum(self._steps) / len(self._steps))
        return (sum(self._steps) + (_RECENT - len(self._steps)) * first) / _RECENT
