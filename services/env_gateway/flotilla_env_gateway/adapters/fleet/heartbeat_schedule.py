"""Order of heartbeats that keeps all instances alive. No I/O; the clock is an argument."""

import heapq
import math
import random
from dataclasses import dataclass

# A beat is due when a third of an instance's time has passed, and late after two thirds.
_DUE = 1 / 3
_LATE = 2 / 3
# Beats in flight: twice the number that follows from their count, latency and period.
_HEADROOM = 2.0
_FEWEST, _MOST = 16, 1024
# Weight of the newest beat in the estimate of the latency.
_NEWEST = 1 / 8
# A beat may take this many times the usual latency, within shares of the instance's time.
_PATIENCE = 4.0
_LEAST_PATIENCE, _MOST_PATIENCE = 1 / 4, 1 / 2
# Wait after a failure, as a share of the time left, so that retries speed up as it runs out.
_AGAIN = 1 / 16
_AGAIN_S = (0.05, 5.0)


@dataclass(eq=False, slots=True)
class _Watch:
    """Times of one instance. `heard_from` is when the last confirmed beat was sent, and `heard_at`
    when its answer came: the instance's time runs from a moment in between. `due_at` is when the
    next beat is due, unless it is in flight, and `ends_at` when to check whether the time has
    passed."""

    instance_id: str
    heard_from: float
    heard_at: float
    ends_at: float
    due_at: float | None = None
    sent_at: float | None = None


class HeartbeatSchedule:
    """Schedule of heartbeats for instances that end `ttl_s` after their last one: earliest deadline
    first, with as many beats at once as their latency requires (Little's law).

    Each beat that begins ends in `confirm_beat` or `record_failure`, or with `forget_instance`."""

    def __init__(self, *, ttl_s: float, rng: random.Random | None = None) -> None:
        self._ttl_s = ttl_s
        self._rng = rng or random.Random()
        self._watches: dict[str, _Watch] = {}
        self._in_flight: dict[str, _Watch] = {}
        # Entries of an instance that has been forgotten, or has new times, are skipped.
        self._coming: list[tuple[float, str]] = []
        self._due: list[tuple[float, str]] = []
        self._ends: list[tuple[float, str]] = []
        self._latency_s = 0.0

    def __len__(self) -> int:
        return len(self._watches)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def timeout_s(self) -> float:
        """The time to wait for a beat: a slow one is not a failure if all are slow."""
        least_s, most_s = self._ttl_s * _LEAST_PATIENCE, self._ttl_s * _MOST_PATIENCE
        return min(most_s, max(least_s, _PATIENCE * self._latency_s))

    def max_in_flight(self, now: float) -> int:
        """Return how many beats may be in flight."""
        oldest = next(iter(self._in_flight.values()), None)
        # Unanswered beats show a rising latency before their answers do.
        waiting_s = now - oldest.sent_at if oldest and oldest.sent_at is not None else 0.0
        latency_s = max(self._latency_s, waiting_s)
        needed = _HEADROOM * len(self._watches) * latency_s / (self._ttl_s * _DUE)
        return max(_FEWEST, min(_MOST, math.ceil(needed)))

    def count_late(self, now: float) -> int:
        """Count instances without a confirmed heartbeat for two thirds of their time."""
        limit = now - self._ttl_s * _LATE
        return sum(watch.heard_at < limit for watch in self._watches.values())

    def watch_instance(self, instance_id: str, now: float) -> None:
        """Add an instance that runs as of now."""
        watch = _Watch(instance_id, now, now, ends_at=now + self._ttl_s)
        self._watches[instance_id] = watch
        heapq.heappush(self._ends, (watch.ends_at, instance_id))
        self._plan_beat(watch, now + self._ttl_s * _DUE)

    def forget_instance(self, instance_id: str) -> None:
        self._watches.pop(instance_id, None)
        self._in_flight.pop(instance_id, None)

    def begin_due_beats(self, now: float) -> list[str]:
        """Begin the beats to send now, and return their instances."""
        while self._coming and self._coming[0][0] <= now:
            due_at, instance_id = heapq.heappop(self._coming)
            watch = self._watches.get(instance_id)
            if watch is not None and watch.due_at == due_at:
                heapq.heappush(self._due, (watch.heard_from, instance_id))
        begun: list[str] = []
        at_once = self.max_in_flight(now)
        while self._due and len(self._in_flight) < at_once:
            _, instance_id = heapq.heappop(self._due)
            watch = self._watches.get(instance_id)
            if watch is not None and watch.due_at is not None:
                watch.due_at, watch.sent_at = None, now
                self._in_flight[instance_id] = watch
                begun.append(instance_id)
        return begun

    def confirm_beat(self, instance_id: str, now: float) -> None:
        watch = self._finish_beat(instance_id, now)
        if watch is not None and watch.sent_at is not None:
            watch.heard_from, watch.heard_at = watch.sent_at, now
            self._plan_beat(watch, watch.heard_from + self._ttl_s * _DUE)

    def record_failure(
        self, instance_id: str, now: float, retry_after_s: float | None = None
    ) -> None:
        """Plan the next beat after a failure. A pause that the server requests is honoured as far
        as the instance survives it."""
        watch = self._finish_beat(instance_id, now)
        if watch is None:
            return
        left_s = max(0.0, watch.heard_from + self._ttl_s - now)
        shortest_s, longest_s = _AGAIN_S
        wait_s = min(longest_s, max(shortest_s, left_s * _AGAIN)) * self._rng.uniform(0.5, 1.5)
        self._plan_beat(watch, now + max(wait_s, min(retry_after_s or 0.0, left_s / 2)))

    def pop_lost(self, now: float) -> list[str]:
        """Forget and return the instances whose time has passed without a heartbeat."""
        lost: list[str] = []
        while self._ends and self._ends[0][0] <= now:
            ends_at, instance_id = heapq.heappop(self._ends)
            watch = self._watches.get(instance_id)
            if watch is None or watch.ends_at != ends_at:
                continue
            watch.ends_at = watch.heard_at + self._ttl_s
            if watch.ends_at > now:
                heapq.heappush(self._ends, (watch.ends_at, instance_id))
            else:
                self.forget_instance(instance_id)
                lost.append(instance_id)
        return lost

    def next_event_at(self) -> float | None:
        """Return when the next action is due, unless a beat ends before."""
        return min((heap[0][0] for heap in (self._coming, self._ends) if heap), default=None)

    def _plan_beat(self, watch: _Watch, at: float) -> None:
        watch.due_at = at
        heapq.heappush(self._coming, (at, watch.instance_id))

    def _finish_beat(self, instance_id: str, now: float) -> _Watch | None:
        watch = self._in_flight.pop(instance_id, None)
        if watch is not None and watch.sent_at is not None:
            took_s = now - watch.sent_at
            self._latency_s += _NEWEST * (took_s - self._latency_s)
        return watch
