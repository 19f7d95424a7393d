"""Resampling of a batch, which the guard orders when engines have diverged from the trainer."""

from dataclasses import dataclass, replace

from flotilla_common.telemetry.log import get_logger
from flotilla_learner.group_types import EndedGroup
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.weights.weight_broadcast import WeightBroadcast

_log = get_logger(__name__)
DROP_REASON = "mismatch"


@dataclass(frozen=True, slots=True)
class EngineResync:
    """Resynchronises engines with the trainer, and discards what they have sampled."""

    dispatcher: GroupDispatcher
    broadcast: WeightBroadcast
    max_staleness: int

    async def resync_engines(self, batch: Batch, version: int) -> None:
        """Sample a batch again from engines that have reloaded the newest policy and proved it.

        Leases end with their work in progress: what the engines compute now may be as wrong as
        what they have submitted.
        """
        dispatcher, policy = self.dispatcher, self.dispatcher.book.policy
        assert policy is not None, "a batch was sampled from some policy"
        for worker_id in dispatcher.book.workers.worker_ids:
            await dispatcher.mark_not_serving(worker_id, policy)
        # All groups in the batcher, as if they were too old at this version.
        waiting = dispatcher.batcher.drop_stale(version + 1 + self.max_staleness)
        ended = [
            EndedGroup(
                group.spec, tuple(r.trajectory.key for r in group.graded), version, DROP_REASON
            )
            for group in (*batch.all_groups, *waiting)
        ]
        begun = dispatcher.book.drop_stale(version + 1)
        ended += [replace(group, reason=DROP_REASON) for group in begun]
        await dispatcher.endings.settle_groups(ended)
        self.broadcast.resync_all()
        await dispatcher.notify_changed()
        _log.warning(
            "sampling again from scratch; every engine reloads", version=version, dropped=len(ended)
        )
