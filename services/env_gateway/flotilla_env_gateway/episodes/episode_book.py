"""Episodes and their leases: holder, state and expiry. No I/O, no clock."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.tasks.task_format import Task

# A client has at most so many pending calls, and repeats only these; an older one is a bug worth an
# error.
ANSWERS_KEPT = 16
_FORGOTTEN_KEPT = 8192


class EpisodeState(StrEnum):
    QUEUED = "queued"
    PROVISIONING = "provisioning"
    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


_NEXT = {
    EpisodeState.QUEUED: {EpisodeState.PROVISIONING, EpisodeState.FAILED, EpisodeState.CLOSED},
    EpisodeState.PROVISIONING: {EpisodeState.WARMING, EpisodeState.FAILED, EpisodeState.CLOSED},
    EpisodeState.WARMING: {EpisodeState.READY, EpisodeState.FAILED, EpisodeState.CLOSED},
    EpisodeState.READY: {EpisodeState.CLOSED},
    EpisodeState.FAILED: {EpisodeState.CLOSED},
    EpisodeState.CLOSED: set[EpisodeState](),
}


class EpisodeLostError(Exception):
    """The episode is unknown, closed, expired or replaced, as the message states."""


class CallSeqError(Exception):
    """A `call_seq` that is neither the next one nor one with a kept answer."""


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """A worker's request for an episode. `budget_s` bounds the whole episode, grading
    included."""

    request_id: str
    run_id: str
    group_id: str
    attempt_index: int
    try_index: int
    opening: int
    worker_id: str
    task: Task
    budget_s: float

    @property
    def attempt_key(self) -> tuple[str, str, int]:
        return (self.run_id, self.group_id, self.attempt_index)


@dataclass(eq=False, slots=True)
class Episode:
    """One episode. `lease_until` is infinite before READY: until then the open stream itself
    is the lease."""

    episode_id: str
    spec: EpisodeSpec
    opened_at: float
    ends_at: float
    state: EpisodeState = EpisodeState.QUEUED
    detail: str = ""
    lease_until: float = float("inf")
    tainted: bool = False
    lost: bool = False
    # The first missing call_seq.
    next_seq: int = 0
    seqs_kept: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def advance_state(self, state: EpisodeState, detail: str = "") -> None:
        if state not in _NEXT[self.state]:
            raise ValueError(f"an episode cannot go from {self.state} to {state}")
        self.state = state
        self.detail = detail

    def register_call(self, call_seq: int, *, parallel: bool = False) -> bool:
        """Register a call; a `parallel` one may arrive before its predecessors. Return True if it
        is new, False if its answer is kept. Raises CallSeqError."""
        if call_seq in self.seqs_kept:
            return False
        last_due = self.next_seq + (ANSWERS_KEPT - 1 if parallel else 0)
        if not self.next_seq <= call_seq <= last_due:
            raise CallSeqError(f"call_seq {call_seq} where {self.next_seq} is next")
        self.seqs_kept[call_seq] = None
        while self.next_seq in self.seqs_kept:
            self.next_seq += 1
        return True

    def forget_old_calls(self) -> list[int]:
        """Drop and return the sequence numbers whose answers are no longer needed."""
        surplus = max(0, len(self.seqs_kept) - ANSWERS_KEPT)
        return [self.seqs_kept.popitem(last=False)[0] for _ in range(surplus)]


class EpisodeBook:
    """All episodes of one gateway. Times are seconds on one monotonic clock."""

    def __init__(self, *, prefix: str, lease_ttl_s: float) -> None:
        self.lease_ttl_s = lease_ttl_s
        self._prefix = prefix
        self._count = 0
        self._by_id: dict[str, Episode] = {}
        self._by_request: dict[str, Episode] = {}
        self._by_attempt: dict[tuple[str, str, int], Episode] = {}
        self._forgotten: BoundedDict[str, str] = BoundedDict(_FORGOTTEN_KEPT)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Episode]:
        return iter(list(self._by_id.values()))

    def find_joinable(self, spec: EpisodeSpec) -> Episode | None:
        """Return the open episode of the same request, or None if `spec` requests a new one.

        Raises EpisodeLostError for a request that has ended, and for a try older than the
        open one."""
        known = self._by_request.get(spec.request_id)
        if known is not None:
            return known
        if reason := self._forgotten.get(f"request:{spec.request_id}"):
            raise EpisodeLostError(f"the episode of request {spec.request_id!r} {reason}")
        older = self._by_attempt.get(spec.attempt_key)
        if older is not None and older.spec.try_index > spec.try_index:
            raise EpisodeLostError(f"try {older.spec.try_index} of this attempt is open already")
        return None

    def open_episode(self, spec: EpisodeSpec, now: float) -> tuple[Episode, Episode | None]:
        """Start an episode. Return it and the episode that it replaces, which the caller
        closes."""
        self._count += 1
        episode_id = f"{self._prefix}-{self._count}"
        episode = Episode(episode_id, spec, opened_at=now, ends_at=now + spec.budget_s)
        replaced = self._by_attempt.get(spec.attempt_key)
        self._by_id[episode_id] = episode
        self._by_request[spec.request_id] = episode
        self._by_attempt[spec.attempt_key] = episode
        return episode, replaced

    def get_episode(self, episode_id: str) -> Episode:
        try:
            return self._by_id[episode_id]
        except KeyError:
            reason = self._forgotten.get(episode_id, "is unknown here")
            raise EpisodeLostError(f"episode {episode_id[:100]!r} {reason}") from None

    def mark_ready(self, episode: Episode, now: float) -> None:
        episode.advance_state(EpisodeState.READY)
        self.extend_lease(episode, now)

    def extend_lease(self, episode: Episode, now: float) -> None:
        if episode.state is EpisodeState.READY:
            episode.lease_until = now + self.lease_ttl_s

    def renew_leases(self, worker_id: str, episode_ids: Iterable[str], now: float) -> list[str]:
        """Renew the leases of a worker's episodes; return the ids that it no longer holds."""
        lost: list[str] = []
        for episode_id in episode_ids:
            episode = self._by_id.get(episode_id)
            if episode is None or episode.spec.worker_id != worker_id or episode.lost:
                lost.append(episode_id)
            else:
                self.extend_lease(episode, now)
        return lost

    def list_expired(self, now: float) -> list[tuple[Episode, str]]:
        """Return the episodes to close, each with the reason reported to later callers."""
        result: list[tuple[Episode, str]] = []
        for episode in self._by_id.values():
            if now >= episode.ends_at:
                result.append((episode, "is over its budget"))
            elif now >= episode.lease_until:
                result.append((episode, "expired: its lease was not renewed"))
        return result

    def close(self, episode: Episode, reason: str, *, forget_request: bool = False) -> bool:
        """End an episode; return False if it has already ended.

        With `forget_request` a repeat of the request opens a new episode instead of being
        lost."""
        if self._by_id.pop(episode.episode_id, None) is None:
            return False
        self._by_request.pop(episode.spec.request_id, None)
        if self._by_attempt.get(episode.spec.attempt_key) is episode:
            del self._by_attempt[episode.spec.attempt_key]
        episode.advance_state(EpisodeState.CLOSED, reason)
        self._forgotten[episode.episode_id] = reason
        if not forget_request:
            self._forgotten[f"request:{episode.spec.request_id}"] = reason
        return True

    def count_by_state(self) -> dict[str, Counter[str]]:
        """Count the episodes by environment and state."""
        result: dict[str, Counter[str]] = {}
        for episode in self._by_id.values():
            result.setdefault(episode.spec.task.env_key, Counter())[episode.state.value] += 1
        return result
