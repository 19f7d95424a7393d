"""How groups end: complete, without signal, or dropped; and what the journal is told of it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from services.learner.groups.batcher import Batch, Batcher, ReadyGroup, Record
from services.learner.groups.counters import Tally
from services.learner.groups.leases import LeaseBook
from services.learner.groups.messages import now
from services.learner.groups.open_attempts import Records
from services.learner.groups.requeue import GivingUp
from services.learner.groups.task_groups import FreshGroups
from services.learner.groups.types import TEMPLATE_ERROR, Ended, GroupSpec, Purpose
from services.learner.journal.curriculum import Snapshot
from services.learner.journal.integrity import CORRUPT
from services.learner.journal.store import Journal


class Endings:
    """Takes groups out of the lease book. `on_eval_group` gets complete ones of evaluations."""

    def __init__(
        self,
        book: LeaseBook,
        batcher: Batcher,
        journal: Journal,
        fresh: FreshGroups,
        giving_up: GivingUp,
        tally: Tally,
        changed: asyncio.Condition,
    ) -> None:
        """`changed` is notified of every group that ends."""
        self.records = Records()
        self.on_eval_group: Callable[[ReadyGroup], None] = _ignore
        self._book = book
        self._batcher = batcher
        self._journal = journal
        self._fresh = fresh
        self._giving_up = giving_up
        self._tally = tally
        self._changed = changed

    def take(self, spec: GroupSpec, record: Record) -> Ended | None:
        """Note how a try ended; says so when that completed its group."""
        self.records.add(record)
        self._tally.received(record, spec)
        self._giving_up.tried(spec, record, now())
        graded = record.trajectory.reward is not None and not record.dropped
        return self._book.record(
            record.trajectory.key,
            graded=graded,
            oldest_version=record.oldest_version,
            drop=TEMPLATE_ERROR if record.spoils_its_group else "",
        )

    async def settle(self, ended: Sequence[Ended]) -> None:
        """Hand complete groups on; journal the others, with those that replace them."""
        requeued: list[GroupSpec] = []
        filtered: list[str] = []
        for group in ended:
            ready = self.records.ready(group, now())
            if group.reason:
                requeued += self._drop(group.reason, ready)
            elif self._complete(ready):
                filtered.append(group.group.group_id)
        dropped = [group for group in ended if group.reason]
        # The change must be on its way to the journal before anything else is drawn.
        snapshot = self.snapshot()
        if dropped or filtered or snapshot:
            await self._journal.end_groups(dropped, requeued, filtered, snapshot)
        if snapshot:
            self._fresh.journaled(snapshot.drawn)
        self._book.add(requeued)
        await self._notify()

    def snapshot(self) -> Snapshot | None:
        """What the curriculum changed because of groups that could not be graded."""
        change = self._fresh.curriculum.flush()
        return Snapshot(change, self._fresh.unjournaled) if change else None

    def stale(self, version: int) -> list[Ended]:
        """End what a step from `version` on may no longer train on."""
        ended = self._book.drop_stale(self._batcher.oldest_allowed(version))
        for group in self._batcher.drop_stale(version):
            keys = tuple(record.trajectory.key for record in group.graded)
            ended.append(Ended(group.spec, keys, group.oldest_version or 0, "stale"))
        return ended

    def forget(self, group_ids: Iterable[str]) -> None:
        """Free the slots of groups that are over."""
        ids = list(group_ids)
        self._book.free(ids)
        self.records.forget(ids)

    async def intact(self, batch: Batch) -> bool:
        """Else what is damaged in the journal is dropped, and the batch's other groups go back."""
        damaged = await self._journal.damaged(batch.attempts)
        if not damaged:
            return True
        await self._journal.quarantine(damaged)
        ids = {key.group_id for key in damaged}
        for group in batch.groups:
            if group.spec.group_id in ids:
                self._tally.dropped(CORRUPT, group)
        self._batcher.put_back(batch, without=ids)
        self.forget(ids)
        await self._notify()
        return False

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _drop(self, reason: str, group: ReadyGroup) -> list[GroupSpec]:
        """Returns the group that replaces it, if one does."""
        spec = group.spec
        self._tally.dropped(reason, group)
        self.forget([spec.group_id])
        if reason == TEMPLATE_ERROR:
            self._giving_up.unrendered(group)
        if spec.purpose is Purpose.EVAL:
            # Its evaluation reports the task as missing.
            self.on_eval_group(replace(group, graded=()))
        if reason != "too_few_graded" or spec.purpose is not Purpose.TRAIN:
            self._giving_up.over(spec)
            return []
        open_since = self._book.open_since(spec.task.env_key)
        replacement = self._giving_up.replacement(group, open_since=open_since)
        return [replacement] if replacement else []

    def _complete(self, group: ReadyGroup) -> bool:
        """True when a TRAIN group has no signal and another is to be sampled in its place."""
        spec = group.spec
        self._giving_up.completed(group, open_since=self._book.open_since(spec.task.env_key))
        if spec.purpose is Purpose.EVAL:
            self.forget([spec.group_id])
            self.on_eval_group(group)
            return False
        filtered = self._batcher.add(group)
        if filtered:
            # Its slot alone: until a step has counted it, it may still get too old for that.
            self._book.free([spec.group_id])
        return filtered


def _ignore(group: ReadyGroup) -> None:
    """Nobody evaluates."""
