"""Tries of unfinished groups, without their arrays."""

from collections.abc import Iterable

from services.common.domain.attempts import AttemptKey
from services.learner.group_types import EndedGroup
from services.learner.groups.batcher import AttemptRecord, ReadyGroup


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
