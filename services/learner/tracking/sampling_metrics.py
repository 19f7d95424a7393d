"""Metrics under `sampling/*`: composition of a step, and state of the curriculum."""

from collections import Counter

from services.common.log import get_logger
from services.learner.groups.batcher import Batch
from services.learner.sampling.curriculum import Curriculum
from services.learner.sampling.curriculum_changes import EventKind, TaskStanding

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
