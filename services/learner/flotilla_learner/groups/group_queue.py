"""Groups not yet leased: requeued ones, fresh ones, and those of evaluations."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

from flotilla_common.domain.attempts import Purpose
from flotilla_learner.group_types import GroupSpec


class GroupQueue:
    """Two queues of groups that wait for a worker. Fresh TRAIN groups are made on demand.

    A worker gets the first group that it can do; at most `bound` groups that it cannot do wait
    for another worker."""

    def __init__(self, next_group: Callable[[], GroupSpec], *, bound: int) -> None:
        self._next_group = next_group
        self._bound = bound
        self._queues: dict[Purpose, deque[GroupSpec]] = {p: deque() for p in Purpose}

    def __iter__(self) -> Iterator[GroupSpec]:
        for queue in self._queues.values():
            yield from queue

    def add_groups(self, specs: Iterable[GroupSpec]) -> None:
        """Put groups before all fresh ones."""
        for spec in specs:
            self._queues[spec.purpose].append(spec)

    def find_next(self, purpose: Purpose, capabilities: Collection[str]) -> GroupSpec | None:
        """Return the next group for a worker; it stays in the queue until it is taken."""
        queue = self._queues[purpose]
        for spec in queue:
            if spec.task.needs.issubset(capabilities):
                return spec
        while purpose is Purpose.TRAIN and len(queue) < self._bound:
            queue.append(spec := self._next_group())
            if spec.task.needs.issubset(capabilities):
                return spec
        return None

    def take_group(self, spec: GroupSpec) -> None:
        self._queues[spec.purpose].remove(spec)

    def drop_groups(self, group_ids: Collection[str]) -> None:
        """Remove groups of evaluations."""
        kept = (s for s in self._queues[Purpose.EVAL] if s.group_id not in group_ids)
        self._queues[Purpose.EVAL] = deque(kept)
