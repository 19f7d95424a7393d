"""Collection of all metrics of one step."""

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median

from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.alarms.attempt_behavior import sum_attempts
from flotilla_learner.alarms.types import StepFacts
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.groups.counters import StepCounters
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.groups.staleness import STALE
from flotilla_learner.sampling.curriculum import Curriculum
from flotilla_learner.sampling.curriculum_changes import EventKind, TaskStanding
from flotilla_learner.tracking.metric_formulas import (
    StepTimes,
    candidate_metrics,
    cost_metrics,
    environment_metrics,
    failure_metrics,
    judge_score_metrics,
    reward_metrics,
    staleness_metrics,
    timing_metrics,
    train_throughput,
)

# Number of steps in the window.
WINDOW = 8


class ThroughputWindow:
    """Newest steps of this start, at most `WINDOW`."""

    def __init__(self) -> None:
        self._steps: deque[tuple[StepTimes, StepCounters]] = deque(maxlen=WINDOW)

    def add_step(self, times: StepTimes, counters: StepCounters) -> dict[str, float]:
        """Add a step, with the counts since the previous one; return the window's figures:

        - throughput/tokens_per_sec_gen: sum of policy tokens received / sum of step seconds,
          evaluations included in both
        - throughput/trajectories_per_sec: sum of tries received / sum of step seconds
        - timing/overlap_ratio: median step / max(median rollout, median train), in seconds; 1
          if the shorter hides behind the longer, up to 2 if they take turns. A rollout lasts
          from the first lease of a step's groups to the end of the last, so below 1 if the
          groups of a step are sampled during several"""
        self._steps.append((times, counters))
        seconds = max(sum(step.step for step, _ in self._steps), 1e-9)
        figures = {
            "throughput/tokens_per_sec_gen": sum(c.policy_tokens for _, c in self._steps) / seconds,
            "throughput/trajectories_per_sec": sum(c.trajectories for _, c in self._steps)
            / seconds,
        }
        rollout = median(step.rollout for step, _ in self._steps)
        train = median(step.train for step, _ in self._steps)
        if max(rollout, train) > 0:
            whole = median(step.step for step, _ in self._steps)
            figures["timing/overlap_ratio"] = whole / max(rollout, train)
        return figures


def step_times(
    batch: Batch, stages: dict[str, float], whole: float, sync: float | None
) -> StepTimes:
    groups = batch.all_groups
    rollout = max(g.ended_at for g in groups) - min(g.leased_at for g in groups)
    return StepTimes(
        rollout_wait=stages.get("rollout_wait", 0.0),
        rollout=rollout,
        train=stages.get("train", 0.0),
        publish=stages.get("publish", 0.0),
        sync=sync,
        eval_wait=stages.get("eval_wait", 0.0),
        checkpoint=stages.get("checkpoint", 0.0),
        step=whole,
    )


def step_facts(
    step: int, batch: Batch, metrics: Mapping[str, float], counters: StepCounters
) -> StepFacts:
    """Return the facts about a step that the alarms judge."""
    signal: dict[str, tuple[int, int]] = {}
    tokens: dict[str, list[int]] = {}
    attempts: dict[str, list[Trajectory]] = {}
    for group in batch.all_groups:
        env = group.spec.task.env_key
        if not group.is_judged:
            some, whole = signal.get(env, (0, 0))
            signal[env] = (some + group.has_signal, whole + 1)
        tokens.setdefault(env, []).extend(record.policy_tokens for record in group.graded)
        attempts.setdefault(env, []).extend(record.trajectory for record in group.graded)
    stale = counters.dropped_groups[STALE]
    envs = tokens.keys() | counters.given_up.keys() | counters.refused.keys()
    return StepFacts(
        step=step,
        metrics=metrics,
        signal=signal,
        no_grade={env: (counters.no_grade[env], tries) for env, tries in counters.tries.items()},
        stale=(stale, stale + len(batch.all_groups)),
        lengths={env: sum(found) / len(found) for env, found in tokens.items() if found},
        given_up={env: counters.given_up[env] for env in sorted(envs)},
        refused={env: counters.refused[env] for env in sorted(envs)},
        refused_words=dict(counters.refused_words),
        no_grade_words=dict(counters.no_grade_words),
        conduct={env: sum_attempts(found) for env, found in attempts.items()},
    )


class StepMetrics:
    """Computes metrics, including those over several steps."""

    def __init__(self, dispatcher: GroupDispatcher) -> None:
        self._dispatcher = dispatcher
        self._pace = ThroughputWindow()

    def compute_metrics(
        self, batch: Batch, version: int, times: StepTimes, counters: StepCounters
    ) -> dict[str, float]:
        """Compute all metrics of the step that `batch` made out of `version`; `counters` cover
        everything since the previous step."""
        tally = self._dispatcher.tally
        groups = batch.all_groups
        return {
            **reward_metrics(groups),
            **judge_score_metrics(groups),
            **environment_metrics(groups, counters.tries, counters.no_grade),
            **candidate_metrics(groups),
            **staleness_metrics(batch, version, tally),
            **failure_metrics(counters),
            **cost_metrics(batch, counters),
            **timing_metrics(times),
            **train_throughput(batch, times),
            **self._pace.add_step(times, counters),
            **sampling_metrics(self._dispatcher.curriculum, version + 1, batch),
        }


_log = get_logger(__name__)


def sampling_metrics(curriculum: Curriculum, step: int, batch: Batch) -> dict[str, float]:
    """Return `sampling/*` of one step.

    - epoch: see `Curriculum.epoch_at`; distinct_tasks: tasks drawn at least once in the run
    - parked, probed, unparked, quarantined, quarantine_refused: tasks since the previous step
    - replaced_groups: groups without signal that were replaced by other samples
    - lacking_groups: places of the step still taken by groups without signal
    - by environment share and trained_share: its part of all groups of the step, and of the
      trained ones; passes: whole passes over its tasks; parked_tasks and quarantined_tasks:
      their current number; quarantine_refused as above"""
    counts, standings = curriculum.take_counts(), curriculum.standings
    metrics = {
        "sampling/epoch": curriculum.epoch_at(step),
        "sampling/distinct_tasks": float(curriculum.distinct_tasks),
        "sampling/replaced_groups": float(batch.replaced),
        "sampling/lacking_groups": float(batch.places_without_signal),
    }
    for kind in EventKind:
        metrics[f"sampling/{kind}"] = float(sum(n for (_, k), n in counts.items() if k is kind))
    sampled = Counter(group.spec.task.env_key for group in batch.all_groups)
    trained = Counter(group.spec.task.env_key for group in batch.groups)
    for env, turns in curriculum.whole_passes().items():
        prefix = f"sampling/{env.replace('/', '_')}"
        parked = standings[env, TaskStanding.SOLVED] + standings[env, TaskStanding.IMPOSSIBLE]
        metrics[f"{prefix}/share"] = sampled[env] / max(1, sampled.total())
        metrics[f"{prefix}/trained_share"] = trained[env] / max(1, trained.total())
        metrics[f"{prefix}/passes"] = float(turns)
        metrics[f"{prefix}/parked_tasks"] = float(parked)
        refused = counts[env, EventKind.QUARANTINE_REFUSED]
        metrics[f"{prefix}/quarantine_refused"] = float(refused)
        metrics[f"{prefix}/quarantined_tasks"] = float(standings[env, TaskStanding.QUARANTINED])
    _log.info("step composition", step=step, sampled=dict(sampled), trained=dict(trained))
    return metrics
