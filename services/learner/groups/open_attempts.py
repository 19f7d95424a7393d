"""The tries of the groups that are not over, without their arrays."""

from collections.abc import Iterable

from services.learner.groups.batcher import ReadyGroup, Record
from services.learner.groups.types import Ended
from services.learner.types import AttemptKey


class Records:
    """What was received for each group, and since when it is worked on."""

    def __init__(self) -> None:
        self._records: dict[str, dict[AttemptKey, Record]] = {}
        self._leased_at: dict[str, float] = {}

    def leased(self, group_id: str, now: float) -> None:
        """A group was leased, maybe not for the first time."""
        self._leased_at.setdefault(group_id, now)

    def add(self, record: Record) -> None:
        key = record.trajectory.key
        self._records.setdefault(key.group_id, {})[key] = record

    def ready(self, ended: Ended, now: float) -> ReadyGroup:
        """An ended group with what was received for it."""
        group_id = ended.group.group_id
        records = self._records.get(group_id, {})
        graded = tuple(records[key] for key in ended.graded)
        others = tuple(r for key, r in records.items() if key not in ended.graded)
        return ReadyGroup(ended.group, graded, others, self._leased_at.get(group_id, now), now)

    def forget(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self._records.pop(group_id, None)
            self._leased_at.pop(group_id, None)
