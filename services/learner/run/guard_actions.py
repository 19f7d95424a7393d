"""Effects of the guard's rulings on a run."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from services.common.log import get_logger
from services.learner.group_types import EndedGroup
from services.learner.groups.batcher import Batch
from services.learner.guard.mismatch_guard import Ruling
from services.learner.run.context import RunContext

_log = get_logger(__name__)
DROP_REASON = "mismatch"


async def judge_batch(
    parts: RunContext, batch: Batch, version: int, save: Callable[[], Awaitable[None]]
) -> Ruling:
    """Compare a batch before it is trained on; if the run is to be synchronised again, drop it
    and all else that was sampled.

    Raises MismatchError when the run must not start, or, `save`d, must not go on."""
    with parts.watchdog.stage("compare"):
        ruling = await parts.guard.before_step(batch, version)
    if ruling.stop:
        await save()
        raise ruling.stop
    if ruling.resync:
        await _resync_engines(parts, batch, version)
    return ruling


async def _resync_engines(parts: RunContext, batch: Batch, version: int) -> None:
    """Sample anew, from engines that have loaded the newest policy again and shown it.

    Leases end with what is under way on them: what the engines compute now may be as wrong as
    what they have handed in.
    """
    dispatcher, policy = parts.dispatcher, parts.dispatcher.book.policy
    assert policy is not None, "a batch was sampled from some policy"
    for worker_id in dispatcher.book.workers.worker_ids:
        await dispatcher.mark_not_serving(worker_id, policy)
    waiting = dispatcher.batcher.drop_stale(version + 1 + parts.config.max_staleness)
    ended = [
        EndedGroup(group.spec, tuple(r.trajectory.key for r in group.graded), version, DROP_REASON)
        for group in (*batch.all_groups, *waiting)
    ]
    begun = dispatcher.book.drop_stale(version + 1)
    ended += [replace(group, reason=DROP_REASON) for group in begun]
    await dispatcher.endings.settle_groups(ended)
    parts.broadcast.resync_all()
    await dispatcher.notify_changed()
    _log.warning("sampling begins anew, every engine reloads", version=version, dropped=len(ended))
