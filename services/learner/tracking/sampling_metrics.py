"""`sampling/*`: what a step was made of, and how the curriculum stands."""

from collections import Counter

from services.common.log import get_logger
from services.learner.groups.batcher import Batch
from services.learner.sampling.curriculum import Curriculum
from services.learner.sampling.curriculum_changes import EventKind, Standing

_log = get_logger(__name__)


def sampling_metrics(curriculum: Curriculum, step: int, batch: Batch) -> dict[str, float]:
    """`sampling/*` of one step.

    - epoch: see `Curriculum.epoch`; distinct_tasks: tasks drawn at least once in the run
    - parked, probed, unparked, quarantined, quarantine_refused: tasks since the step before
    - replaced_groups: groups without signal in whose place others were sampled
    - lacking_groups: places of the step that were taken by groups without signal all the same
    - by environment share and trained_share: its part of all groups of the step, and of those
      that are trained on; passes: whole passes over its tasks; parked_tasks and
      quarantined_tasks: how many are so now; quarantine_refused as above
    """
    counts, standings = curriculum.take_counts(), curriculum.standings
    metrics = {
        "sampling/epoch": curriculum.epoch(step),
        "sampling/distinct_tasks": float(curriculum.distinct_tasks),
        "sampling/replaced_groups": float(batch.replaced),
        "sampling/lacking_groups": float(batch.lacking),
    }
    for kind in EventKind:
        metrics[f"sampling/{kind}"] = float(sum(n for (_, k), n in counts.items() if k is kind))
    sampled = Counter(group.spec.task.env_key for group in batch.all_groups)
    trained = Counter(group.spec.task.env_key for group in batch.groups)
    for env, turns in curriculum.passes().items():
        prefix = f"sampling/{env.replace('/', '_')}"
        parked = standings[env, Standing.SOLVED] + standings[env, Standing.IMPOSSIBLE]
        metrics[f"{prefix}/share"] = sampled[env] / max(1, sampled.total())
        metrics[f"{prefix}/trained_share"] = trained[env] / max(1, trained.total())
        metrics[f"{prefix}/passes"] = float(turns)
        metrics[f"{prefix}/parked_tasks"] = float(parked)
        refused = counts[env, EventKind.QUARANTINE_REFUSED]
        metrics[f"{prefix}/quarantine_refused"] = float(refused)
        metrics[f"{prefix}/quarantined_tasks"] = float(standings[env, Standing.QUARANTINED])
    _log.info("step composition", step=step, sampled=dict(sampled), trained=dict(trained))
    return metrics
