"""Who may open an episode now: limits, batches and a bounded fair queue. No I/O, no clock.

Between runs the queue is round robin, within a run first come, first served. A batch that waits
for its own environment lets others pass; one that waits for the global limit does not, or small
batches would starve large ones.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


class OverLimitError(Exception):
    """The batch can never be admitted; the message names the limit."""


class QueueFullError(Exception):
    """Too many are waiting already."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One episode's place: waiting, then admitted, then released."""

    env_key: str
    admitted: bool = False


@dataclass(eq=False, slots=True)
class _Batch:
    """`unclaimed` members are admitted with the others and have not asked yet."""

    key: tuple[str, ...]
    run_id: str
    env_key: str
    unclaimed: int
    expires_at: float
    admitted: bool = False
    tickets: list[Ticket] = field(default_factory=list[Ticket])

    @property
    def size(self) -> int:
        return self.unclaimed + len(self.tickets)


class Admission:
    """`max_waiting` bounds the episodes in the queue; `batch_ttl_s` how long an admitted batch
    keeps places for members that have not asked yet."""

    def __init__(
        self,
        *,
        max_episodes: int,
        max_by_env: Mapping[str, int],
        max_waiting: int,
        batch_ttl_s: float,
    ) -> None:
        self.max_episodes = max_episodes
        self._max_by_env = max_by_env
        self._max_waiting = max_waiting
        self._batch_ttl_s = batch_ttl_s
        self._held: Counter[str] = Counter()
        self._total = 0
        self._queues: OrderedDict[str, deque[_Batch]] = OrderedDict()
        self._filling: dict[tuple[str, ...], _Batch] = {}

    @property
    def held(self) -> int:
        """Places taken, those kept for members of admitted batches included."""
        return self._total

    @property
    def waiting(self) -> int:
        return sum(len(b.tickets) for b in self._waiting_batches())

    def use_of(self, env_key: str) -> tuple[int, int]:
        """Places taken and episodes in the queue, of one environment."""
        waiting = sum(len(b.tickets) for b in self._waiting_batches() if b.env_key == env_key)
        return self._held[env_key], waiting

    def limit(self, env_key: str) -> int:
        return min(self.max_episodes, self._max_by_env.get(env_key, self.max_episodes))

    def request(
        self, run_id: str, batch: str, env_key: str, opening: int, now: float
    ) -> tuple[Ticket, list[Ticket]]:
        """Ask for one place in a batch of `opening`; returns it and all that became admitted.

        Raises OverLimitError and QueueFullError.
        """
        if opening > (limit := self.limit(env_key)):
            raise OverLimitError(
                f"opening {opening} episodes of {env_key!r} together exceeds the limit of {limit}; "
                f"raise env_gateway.limits.max_episodes or "
                f"env_gateway.environments.{env_key}.max_episodes"
            )
        ticket = Ticket(env_key)
        key = (run_id, batch, env_key, str(opening))
        filling = self._filling.get(key)
        if filling is not None:
            self._claim(filling, ticket)
            return ticket, [ticket] if ticket.admitted else []
        if self.waiting >= self._max_waiting:
            raise QueueFullError(f"{self.waiting} episodes are waiting already")
        new = _Batch(key, run_id, env_key, opening, now + self._batch_ttl_s)
        self._filling[key] = new
        self._claim(new, ticket)
        self._queues.setdefault(run_id, deque()).append(new)
        return ticket, self._admit()

    def release(self, ticket: Ticket) -> list[Ticket]:
        """Give a place back, or leave the queue; returns those that became admitted."""
        if ticket.admitted:
            ticket.admitted = False
            self._free(ticket.env_key, 1)
        else:
            self._leave(ticket)
        return self._admit()

    def expire(self, now: float) -> list[Ticket]:
        """Take back places of members that never asked; returns those that became admitted."""
        for batch in [b for b in self._filling.values() if now >= b.expires_at]:
            del self._filling[batch.key]
            if batch.admitted:
                self._free(batch.env_key, batch.unclaimed)
            batch.unclaimed = 0
        return self._admit()

    def _claim(self, batch: _Batch, ticket: Ticket) -> None:
        batch.unclaimed -= 1
        if batch.admitted:
            ticket.admitted = True
        else:
            batch.tickets.append(ticket)
        if batch.unclaimed == 0:
            del self._filling[batch.key]

    def _free(self, env_key: str, places: int) -> None:
        self._held[env_key] -= places
        self._total -= places

    def _leave(self, ticket: Ticket) -> None:
        for batch in self._waiting_batches():
            if ticket in batch.tickets:
                batch.tickets.remove(ticket)
                if not batch.tickets:
                    self._drop(batch)
                return

    def _drop(self, batch: _Batch) -> None:
        if self._filling.get(batch.key) is batch:
            del self._filling[batch.key]
        queue = self._queues[batch.run_id]
        queue.remove(batch)
        if not queue:
            del self._queues[batch.run_id]

    def _waiting_batches(self) -> Iterator[_Batch]:
        return (batch for queue in self._queues.values() for batch in queue)

    def _admit(self) -> list[Ticket]:
        admitted: list[Ticket] = []
        while (batch := self._next()) is not None:
            queue = self._queues[batch.run_id]
            queue.remove(batch)
            self._queues.move_to_end(batch.run_id)
            if not queue:
                del self._queues[batch.run_id]
            batch.admitted = True
            self._held[batch.env_key] += batch.size
            self._total += batch.size
            for ticket in batch.tickets:
                ticket.admitted = True
            admitted += batch.tickets
        return admitted

    def _next(self) -> _Batch | None:
        """The batch whose turn it is, if it fits. Takes the heads of all runs in turn."""
        blocked: set[str] = set()
        queues = [list(queue) for queue in self._queues.values()]
        depth = max((len(queue) for queue in queues), default=0)
        for row in range(depth):
            for queue in queues:
                if row >= len(queue) or queue[row].env_key in blocked:
                    continue
                batch = queue[row]
                if self._held[batch.env_key] + batch.size > self.limit(batch.env_key):
                    blocked.add(batch.env_key)
                elif self._total + batch.size > self.max_episodes:
                    return None
                else:
                    return batch
        return None
