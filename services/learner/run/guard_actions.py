"""What the guard's rulings do to a run."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from services.common.log import get_logger
from services.learner.groups.batcher import Batch
from services.learner.groups.types import Ended
from services.learner.guard.guard import Ruling
from services.learner.run.context import Parts

_log = get_logger(__name__)
REASON = "mismatch"


async def judged(
    parts: Parts, batch: Batch, version: int, save: Callable[[], Awaitable[None]]
) -> Ruling:
    """Compare a batch before it is trained on; drop it, and all else that was sampled, where the
    run is to be synchronised again.

    Raises MismatchError when the run must not start, or, `save`d, must not go on.
    """
    with parts.watchdog.stage("compare"):
        ruling = await parts.guard.before_step(batch, version)
    if ruling.stop:
        await save()
        raise ruling.stop
    if ruling.resync:
        await _resync(parts, batch, version)
    return ruling


async def _resync(parts: Parts, batch: Batch, version: int) -> None:
    """Sample anew, from engines that have loaded the newest policy again and shown it.

    Leases end with what is under way on them: what the engines compute now may be as wrong as
    what they have handed in.
    """
    dispatcher, policy = parts.dispatcher, parts.dispatcher.book.policy
    assert policy is not None, "a batch was sampled from some policy"
    for worker_id in dispatcher.book.workers.ids:
        await dispatcher.serves_nothing(worker_id, policy)
    waiting = dispatcher.batcher.drop_stale(version + 1 + parts.config.max_staleness)
    ended = [
        Ended(group.spec, tuple(r.trajectory.key for r in group.graded), version, REASON)
        for group in (*batch.all_groups, *waiting)
    ]
    begun = dispatcher.book.drop_stale(version + 1)
    ended += [replace(group, reason=REASON) for group in begun]
    await dispatcher.endings.settle(ended)
    parts.broadcast.resync()
    await dispatcher.notify()
    _log.warning("sampling begins anew, every engine reloads", version=version, dropped=len(ended))
