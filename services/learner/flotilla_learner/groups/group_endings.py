"""End of a group, complete, without signal or dropped, and its record in the journal."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flotilla_common.domain.attempts import JUDGE_FAILED, AttemptKey, FailureKind, Purpose
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.run_folder.record_digests import CORRUPT
from flotilla_learner.group_types import EndedGroup, GroupSpec, GroupVerdict
from flotilla_learner.groups.batcher import Batch, Batcher
from flotilla_learner.groups.counters import Tally
from flotilla_learner.groups.graded_attempts import AttemptRecord, ReadyGroup
from flotilla_learner.groups.leases import LeaseBook
from flotilla_learner.groups.open_groups import GRADING_CHANGED, TOO_FEW_GRADED, TOOLS_CHANGED
from flotilla_learner.groups.staleness import STALE
from flotilla_learner.groups.task_groups import FreshGroups
from flotilla_learner.groups.ungraded_tasks import UngradedTasks
from flotilla_learner.journal.curriculum_tables import CurriculumSnapshot
from flotilla_learner.journal.store import Journal

# Reasons for dropping a group because of one of its attempts.
_SPOILED = frozenset(kind for kind in FailureKind if kind.spoils_group)


class OpenAttempts:
    """Records received for each open group, and the time of its first lease."""

    def __init__(self) -> None:
        self._records: dict[str, dict[AttemptKey, AttemptRecord]] = {}
        self._leased_at: dict[str, float] = {}

    def note_lease(self, group_id: str, now: float) -> None:
        """Record a group's lease, which may not be its first."""
        self._leased_at.setdefault(group_id, now)

    def add_record(self, record: AttemptRecord) -> None:
        key = record.trajectory.key
        self._records.setdefault(key.group_id, {})[key] = record

    def why_unlike(self, record: AttemptRecord) -> str:
        """Return why an attempt that counts cannot be compared with those of its group before, if
        so: other tools, or graded where they are judged."""
        group = self._records[record.trajectory.key.group_id].values()
        others = [each.trajectory for each in group if each.counts]
        digest = record.trajectory.facts.tool_schema_digest
        known = {each.facts.tool_schema_digest for each in others} - {""}
        if digest and known - {digest}:
            return TOOLS_CHANGED
        if any(each.judged != record.trajectory.judged for each in others):
            return GRADING_CHANGED
        return ""

    def settle_verdict(self, verdict: GroupVerdict) -> list[AttemptRecord]:
        """Give the attempts of a group that await its verdict their scores, or none; return them
        as they are now."""
        own = self._records.get(verdict.group_id, {})
        settled = {
            key: replace(record, trajectory=_apply_verdict(record.trajectory, verdict))
            for key, record in own.items()
            if record.trajectory.awaits_verdict and not record.dropped
        }
        own.update(settled)
        return list(settled.values())

    def make_ready_group(self, ended: EndedGroup, now: float) -> ReadyGroup:
        """Combine an ended group with the records received for it."""
        group_id = ended.group.group_id
        records = self._records.get(group_id, {})
        graded = tuple(records[key] for key in ended.graded)
        others = tuple(r for key, r in records.items() if key not in ended.graded)
        return ReadyGroup(ended.group, graded, others, self._leased_at.get(group_id, now), now)

    def forget_groups(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self._records.pop(group_id, None)
            self._leased_at.pop(group_id, None)


@dataclass
class GroupEndings:
    """Ends groups and removes them from the lease book.

    `on_eval_group` receives the complete groups of evaluations. In `unjudged` are those that await
    a verdict, which `settle_verdict` settles."""

    book: LeaseBook
    batcher: Batcher
    journal: Journal
    fresh: FreshGroups
    giving_up: UngradedTasks
    tally: Tally
    # Notified of every group that ends.
    changed: asyncio.Condition

    def __post_init__(self) -> None:
        self.records = OpenAttempts()
        self.on_eval_group: Callable[[ReadyGroup], None] = lambda _: None
        self.unjudged: asyncio.Queue[EndedGroup] = asyncio.Queue()

    def take_record(self, spec: GroupSpec, record: AttemptRecord) -> EndedGroup | None:
        """Record the end of a try; return its group if that completed it."""
        self.records.add_record(record)
        self.tally.count_received(record, spec)
        self.giving_up.note_attempt(spec, record, loop_time())
        drop = str(record.trajectory.failure) if record.spoils_group else ""
        if record.counts:
            drop = drop or self.records.why_unlike(record)
        return self.book.record_attempt(
            record.trajectory.key,
            graded=record.counts,
            oldest_version=record.oldest_version,
            drop=drop,
        )

    async def settle_groups(self, ended: Sequence[EndedGroup]) -> None:
        """Pass complete groups on; journal the others, with their replacements."""
        requeued: list[GroupSpec] = []
        filtered: list[str] = []
        for group in ended:
            ready = self.records.make_ready_group(group, loop_time())
            if group.reason:
                requeued += self._drop_group(group.reason, ready)
            elif ready.awaits_verdict:
                self.unjudged.put_nowait(group)
            elif self._complete_group(ready):
                filtered.append(group.group.group_id)
        dropped = [group for group in ended if group.reason]
        # Queue the change for the journal before anything else is drawn.
        snapshot = self.flush_curriculum()
        if dropped or filtered or snapshot:
            await self.journal.end_groups(dropped, requeued, filtered, snapshot)
        if snapshot:
            self.fresh.mark_journaled(snapshot.drawn)
        self.book.add_groups(requeued)
        async with self.changed:
            self.changed.notify_all()

    async def settle_verdict(self, ended: EndedGroup, verdict: GroupVerdict) -> None:
        """Settle a group whose verdict is journaled; without scores it is dropped."""
        for record in self.records.settle_verdict(verdict):
            self.tally.count_judged(record, ended.group)
            self.giving_up.note_attempt(ended.group, record, loop_time())
        if verdict.scores is None:
            ended = replace(ended, graded=(), reason=JUDGE_FAILED)
        await self.settle_groups([ended])

    async def forget_damaged(self, ended: EndedGroup) -> None:
        """Let go of a complete group that the journal holds damaged."""
        self.tally.count_dropped(CORRUPT, self.records.make_ready_group(ended, loop_time()))
        self.forget_groups([ended.group.group_id])
        async with self.changed:
            self.changed.notify_all()

    def flush_curriculum(self) -> CurriculumSnapshot | None:
        """Flush the curriculum's changes caused by groups that could not be graded."""
        change = self.fresh.curriculum.flush_condemned()
        return CurriculumSnapshot(change, self.fresh.unjournaled) if change else None

    def end_stale(self, version: int) -> list[EndedGroup]:
        """End the groups that a step from `version` on may no longer train on."""
        ended = self.book.drop_stale(self.batcher.oldest_allowed(version))
        for group in self.batcher.drop_stale(version):
            keys = tuple(record.trajectory.key for record in group.graded)
            ended.append(EndedGroup(group.spec, keys, group.oldest_version or 0, STALE))
        return ended

    def forget_groups(self, group_ids: Iterable[str]) -> None:
        """Free the slots of finished groups."""
        ids = list(group_ids)
        self.book.free_groups(ids)
        self.records.forget_groups(ids)

    async def verify_batch(self, batch: Batch) -> bool:
        """Check a batch against the journal; return True if it is intact.

        Otherwise drop the damaged groups and put the others back."""
        damaged = await self.journal.find_damaged(batch.attempt_keys)
        if not damaged:
            return True
        await self.journal.quarantine_records(damaged)
        ids = {key.group_id for key in damaged}
        for group in batch.groups:
            if group.spec.group_id in ids:
                self.tally.count_dropped(CORRUPT, group)
        self.batcher.put_back(batch, without=ids)
        self.forget_groups(ids)
        async with self.changed:
            self.changed.notify_all()
        return False

    def _drop_group(self, reason: str, group: ReadyGroup) -> list[GroupSpec]:
        """Drop a group; return its replacement, at most one group."""
        spec = group.spec
        self.tally.count_dropped(reason, group)
        self.forget_groups([spec.group_id])
        if reason in _SPOILED:
            self.giving_up.note_spoiled(group)
        if spec.purpose is Purpose.EVAL:
            # Its evaluation reports the task as missing.
            self.on_eval_group(replace(group, graded=()))
        if reason not in (TOO_FEW_GRADED, JUDGE_FAILED) or spec.purpose is not Purpose.TRAIN:
            self.giving_up.forget_task(spec)
            return []
        open_since = self.book.open_since(spec.task.env_key)
        replacement = self.giving_up.make_replacement(group, open_since=open_since)
        return [replacement] if replacement else []

    def _complete_group(self, group: ReadyGroup) -> bool:
        """Complete a group; return True if it is a TRAIN group without signal that another one
        replaces."""
        spec = group.spec
        self.giving_up.note_complete(group, open_since=self.book.open_since(spec.task.env_key))
        if spec.purpose is Purpose.EVAL:
            self.forget_groups([spec.group_id])
            self.on_eval_group(group)
            return False
        filtered = self.batcher.add_group(group)
        if filtered:
            # Frees only its slot: until a step has counted it, it may still become too old.
            self.book.free_groups([spec.group_id])
        return filtered


def _apply_verdict(trajectory: Trajectory, verdict: GroupVerdict) -> Trajectory:
    if verdict.scores is not None:
        return replace(trajectory, reward=verdict.scores[trajectory.key.attempt_index])
    failed = {"failure": FailureKind.NO_GRADE, "no_grade": JUDGE_FAILED}
    return replace(trajectory, **failed, detail=verdict.failure)
