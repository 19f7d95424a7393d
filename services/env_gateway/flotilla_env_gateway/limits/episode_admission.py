"""Admission of episodes: limits, batches and a bounded fair queue. No I/O; the clock is an
argument.

Runs get fair shares by weight, as everywhere in the gateway; within a run and an
environment the order is first come, first served. A batch holds nothing until all of its
members have arrived. A batch that does not fit then takes freed places one by one on its
run's turn, while others proceed in the remaining places. So a large batch neither delays
small ones nor is starved by them. Of a batch of more than half of the limit each member is
admitted by itself: otherwise most places would be idle until the last of them is free."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flotilla_env_gateway.limits.fair_queue import FairShares, WeightOf, equal_weight


class OverLimitError(Exception):
    """The batch can never be admitted; the message names the limit."""


class QueueFullError(Exception):
    """Too many are waiting already."""


@dataclass(eq=False, slots=True)
class Ticket:
    """Place of one episode: waiting, then admitted, then released."""

    batch: "_Batch"
    admitted: bool = False


@dataclass(eq=False, slots=True)
class _Batch:
    """Episodes of one group to be admitted together. `age` grows from the oldest batch to the
    newest. `reserved` places are already held while it waits for the others."""

    key: tuple[str, ...]
    run_id: str
    env_key: str
    opening: int
    expires_at: float
    age: int = 0
    reserved: int = 0
    tickets: list[Ticket] = field(default_factory=list[Ticket])

    @property
    def size(self) -> int:
        return len(self.tickets)

    @property
    def missing(self) -> int:
        return self.size - self.reserved


class Admission:
    """Queue of episodes for places. `max_waiting` bounds the episodes in it; `batch_wait_s` is
    how long a batch waits for missing members before it proceeds without them."""

    def __init__(
        self,
        *,
        max_episodes: int,
        max_by_env: Mapping[str, int],
        max_waiting: int,
        batch_wait_s: float,
        weight_of: WeightOf = equal_weight,
    ) -> None:
        self.max_episodes = max_episodes
        self._max_by_env = max_by_env
        self._max_waiting = max_waiting
        self._batch_wait_s = batch_wait_s
        self._shares = FairShares(weight_of)
        self._held: Counter[str] = Counter()
        self._total = 0
        self._waiting: Counter[str] = Counter()
        self._filling: dict[tuple[str, ...], _Batch] = {}
        # Complete batches, by run and environment.
        self._queues: dict[str, dict[str, deque[_Batch]]] = {}
        self._batches = 0
        # Places that others got since the oldest reserving batch got its last one: it gets as many
        # next, or runs that hold less could keep it from its last ones for ever.
        self._owed = 0

    @property
    def held_places(self) -> int:
        """Places taken, those reserved for waiting batches included."""
        return self._total

    @property
    def waiting(self) -> int:
        return self._waiting.total()

    def usage_of(self, env_key: str) -> tuple[int, int]:
        """Return one environment's places taken and episodes in the queue."""
        return self._held[env_key], self._waiting[env_key]

    def limit_of(self, env_key: str) -> int:
        return min(self.max_episodes, self._max_by_env.get(env_key, self.max_episodes))

    def request_place(
        self, run_id: str, batch: str, env_key: str, opening: int, now: float
    ) -> tuple[Ticket, list[Ticket]]:
        """Request one place in a batch of `opening`; return its ticket and all newly admitted
        ones.

        Raises OverLimitError and QueueFullError."""
        if opening > (limit := self.limit_of(env_key)):
            raise OverLimitError(
                f"opening {opening} episodes of {env_key!r} together exceeds the limit of {limit}; "
                f"raise env_gateway.limits.max_episodes or "
                f"env_gateway.environments.{env_key}.max_episodes"
            )
        if 2 * opening > limit:
            opening = 1
        key = (run_id, batch, env_key, str(opening))
        filling = self._filling.get(key)
        if filling is None:
            if self.waiting >= self._max_waiting:
                raise QueueFullError(f"{self.waiting} episodes are waiting already")
            filling = _Batch(key, run_id, env_key, opening, now + self._batch_wait_s)
            self._filling[key] = filling
        ticket = Ticket(filling)
        filling.tickets.append(ticket)
        self._waiting[env_key] += 1
        if filling.size < opening:
            return ticket, []
        self._enqueue_batch(filling)
        return ticket, self._grant_places()

    def release_place(self, ticket: Ticket) -> list[Ticket]:
        """Release a place, or leave the queue; return the newly admitted tickets."""
        batch = ticket.batch
        if ticket.admitted:
            ticket.admitted = False
            self._return_places(batch, 1)
        elif ticket in batch.tickets:
            batch.tickets.remove(ticket)
            self._waiting[batch.env_key] -= 1
            self._drop_if_empty(batch)
        return self._grant_places()

    def expire_batches(self, now: float) -> list[Ticket]:
        """Stop waiting for members that never arrived; return the newly admitted tickets."""
        for batch in [b for b in self._filling.values() if now >= b.expires_at]:
            self._enqueue_batch(batch)
        return self._grant_places()

    def _enqueue_batch(self, batch: _Batch) -> None:
        """Put a batch in line once it has all the members it will get."""
        del self._filling[batch.key]
        self._batches += 1
        batch.age = self._batches
        if batch.run_id not in self._queues:
            self._queues[batch.run_id] = {}
            self._shares.start_waiting(batch.run_id)
        self._queues[batch.run_id].setdefault(batch.env_key, deque()).append(batch)

    def _drop_if_empty(self, batch: _Batch) -> None:
        """Forget a batch that a member has left, if it was the last one."""
        if self._filling.get(batch.key) is batch:
            if not batch.tickets:
                del self._filling[batch.key]
            return
        if not batch.tickets:
            self._dequeue_batch(batch)

    def _dequeue_batch(self, batch: _Batch) -> None:
        queues = self._queues[batch.run_id]
        queues[batch.env_key].remove(batch)
        if not queues[batch.env_key]:
            del queues[batch.env_key]
        if not queues:
            del self._queues[batch.run_id]
            self._shares.stop_waiting(batch.run_id)

    def _grant_places(self) -> list[Ticket]:
        """Give out the places that are free."""
        admitted: list[Ticket] = []
        while (batch := self._next_batch()) is not None:
            oldest = self._oldest_reserving()
            fits = batch.missing <= self._free_places(batch.env_key)
            places = batch.missing if fits else 1
            self._take_places(batch, places)
            if oldest is None or (oldest is batch and fits):
                self._owed = 0
            else:
                self._owed = max(0, self._owed + (-places if oldest is batch else places))
            if fits:
                admitted += self._admit_batch(batch)
        return admitted

    def _admit_batch(self, batch: _Batch) -> list[Ticket]:
        self._dequeue_batch(batch)
        self._waiting[batch.env_key] -= batch.size
        for ticket in batch.tickets:
            ticket.admitted = True
        admitted, batch.tickets = batch.tickets, []
        return admitted

    def _next_batch(self) -> _Batch | None:
        """Return the batch that gets the next place or places, or None if no batch can use
        one."""
        heads = list(self._queue_heads())
        may_reserve = self._may_reserve(heads)
        oldest = self._oldest_reserving()
        if self._owed and oldest is not None and self._free_places(oldest.env_key) > 0:
            return oldest
        for batch in heads:
            room = self._free_places(batch.env_key)
            if batch.missing <= room or (room > 0 and batch in may_reserve):
                return batch
        return None

    def _queue_heads(self) -> Iterator[_Batch]:
        """Yield the first batch of each run and environment, in fair order."""
        for run_id in self._shares.ordered_runs():
            heads = (queue[0] for queue in self._queues[run_id].values())
            yield from sorted(heads, key=lambda batch: batch.age)

    def _may_reserve(self, heads: list[_Batch]) -> set[_Batch]:
        """Return the batches that can all be completed in whatever order places are freed, so
        that they never wait for each other. The oldest come first: no younger batch may
        keep an older one from starting."""
        chosen = {batch for batch in heads if batch.reserved}
        sizes = Counter[str]()
        for batch in chosen:
            sizes[batch.env_key] += batch.size
        # A batch of one takes its place when it gets in.
        others = (batch for batch in heads if batch.size > 1 and not batch.reserved)
        for batch in sorted(others, key=lambda batch: batch.age):
            sizes[batch.env_key] += batch.size
            limit = self.limit_of(batch.env_key)
            if sizes.total() > self.max_episodes or sizes[batch.env_key] > limit:
                break
            chosen.add(batch)
        return chosen

    def _oldest_reserving(self) -> _Batch | None:
        queues = (queue for by_env in self._queues.values() for queue in by_env.values())
        reserving = (queue[0] for queue in queues if queue[0].reserved)
        return min(reserving, key=lambda batch: batch.age, default=None)

    def _free_places(self, env_key: str) -> int:
        free = self.limit_of(env_key) - self._held[env_key]
        return min(free, self.max_episodes - self._total)

    def _take_places(self, batch: _Batch, places: int) -> None:
        batch.reserved += places
        self._held[batch.env_key] += places
        self._total += places
        self._shares.take_places(batch.run_id, places)

    def _return_places(self, batch: _Batch, places: int) -> None:
        self._held[batch.env_key] -= places
        self._total -= places
        self._shares.give_back(batch.run_id, places)
