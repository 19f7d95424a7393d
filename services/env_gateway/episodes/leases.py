"""Episodes and their leases: who holds which, in which state, until when. No I/O, no clock."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from services.env_gateway.episodes.task_format import Task

# A client repeats only its newest call; anything older is a bug worth an error.
ANSWERS_KEPT = 16
_FORGOTTEN_KEPT = 8192


class State(StrEnum):
    QUEUED = "queued"
    PROVISIONING = "provisioning"
    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


_NEXT = {
    State.QUEUED: {State.PROVISIONING, State.FAILED, State.CLOSED},
    State.PROVISIONING: {State.WARMING, State.FAILED, State.CLOSED},
    State.WARMING: {State.READY, State.FAILED, State.CLOSED},
    State.READY: {State.CLOSED},
    State.FAILED: {State.CLOSED},
    State.CLOSED: set[State](),
}


class EpisodeLostError(Exception):
    """The episode is unknown, closed, expired or replaced; the message says which."""


class CallSeqError(Exception):
    """A `call_seq` that is neither the next one nor one whose answer is kept."""


@dataclass(frozen=True, slots=True)
class OpenSpec:
    """What a worker asks for. `budget_s` bounds the whole episode, grading included."""

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
    def attempt(self) -> tuple[str, str, int]:
        return (self.run_id, self.group_id, self.attempt_index)


@dataclass(eq=False, slots=True)
class Episode:
    """`lease_until` is infinite before READY: until then the open stream itself is the lease."""

    episode_id: str
    spec: OpenSpec
    opened_at: float
    ends_at: float
    state: State = State.QUEUED
    detail: str = ""
    lease_until: float = float("inf")
    tainted: bool = False
    lost: bool = False
    next_seq: int = 0
    seqs_kept: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def advance(self, state: State, detail: str = "") -> None:
        if state not in _NEXT[self.state]:
            raise ValueError(f"an episode cannot go from {self.state} to {state}")
        self.state = state
        self.detail = detail

    def admit_call(self, call_seq: int) -> bool:
        """Whether the call is new; False when its answer is kept. Raises CallSeqError."""
        if call_seq in self.seqs_kept:
            return False
        if call_seq != self.next_seq:
            raise CallSeqError(f"call_seq {call_seq} where {self.next_seq} is next")
        self.next_seq += 1
        self.seqs_kept[call_seq] = None
        return True

    def forget_old_calls(self) -> list[int]:
        """The sequence numbers whose answers need not be kept any longer."""
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
        self._forgotten: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Episode]:
        return iter(list(self._by_id.values()))

    def joined(self, spec: OpenSpec) -> Episode | None:
        """The open episode of the same request; None when `spec` asks for a new one.

        Raises EpisodeLostError for a request that has ended, and for a try older than the one
        that is open.
        """
        known = self._by_request.get(spec.request_id)
        if known is not None:
            return known
        if reason := self._forgotten.get(f"request:{spec.request_id}"):
            raise EpisodeLostError(f"the episode of request {spec.request_id!r} {reason}")
        older = self._by_attempt.get(spec.attempt)
        if older is not None and older.spec.try_index > spec.try_index:
            raise EpisodeLostError(f"try {older.spec.try_index} of this attempt is open already")
        return None

    def open(self, spec: OpenSpec, now: float) -> tuple[Episode, Episode | None]:
        """Start an episode; returns it and the one that it replaces, which is to be closed."""
        self._count += 1
        episode_id = f"{self._prefix}-{self._count}"
        episode = Episode(episode_id, spec, opened_at=now, ends_at=now + spec.budget_s)
        replaced = self._by_attempt.get(spec.attempt)
        self._by_id[episode_id] = episode
        self._by_request[spec.request_id] = episode
        self._by_attempt[spec.attempt] = episode
        return episode, replaced

    def get(self, episode_id: str) -> Episode:
        try:
            return self._by_id[episode_id]
        except KeyError:
            reason = self._forgotten.get(episode_id, "is unknown here")
            raise EpisodeLostError(f"episode {episode_id[:100]!r} {reason}") from None

    def ready(self, episode: Episode, now: float) -> None:
        episode.advance(State.READY)
        self.touch(episode, now)

    def touch(self, episode: Episode, now: float) -> None:
        if episode.state is State.READY:
            episode.lease_until = now + self.lease_ttl_s

    def renew(self, worker_id: str, episode_ids: Iterable[str], now: float) -> list[str]:
        """Keep a worker's episodes alive; returns those that it no longer holds."""
        lost: list[str] = []
        for episode_id in episode_ids:
            episode = self._by_id.get(episode_id)
            if episode is None or episode.spec.worker_id != worker_id or episode.lost:
                lost.append(episode_id)
            else:
                self.touch(episode, now)
        return lost

    def expired(self, now: float) -> list[tuple[Episode, str]]:
        """Episodes to close, with the reason to tell whoever still asks for them."""
        result: list[tuple[Episode, str]] = []
        for episode in self._by_id.values():
            if now >= episode.ends_at:
                result.append((episode, "is over its budget"))
            elif now >= episode.lease_until:
                result.append((episode, "expired: its lease was not renewed"))
        return result

    def close(self, episode: Episode, reason: str, *, forget_request: bool = False) -> bool:
        """End an episode; False when it has ended already.

        With `forget_request` a repeat of the request opens a new episode instead of being lost.
        """
        if self._by_id.pop(episode.episode_id, None) is None:
            return False
        self._by_request.pop(episode.spec.request_id, None)
        if self._by_attempt.get(episode.spec.attempt) is episode:
            del self._by_attempt[episode.spec.attempt]
        episode.advance(State.CLOSED, reason)
        self._forgotten[episode.episode_id] = reason
        if not forget_request:
            self._forgotten[f"request:{episode.spec.request_id}"] = reason
        while len(self._forgotten) > _FORGOTTEN_KEPT:
            self._forgotten.popitem(last=False)
        return True

    def counts(self) -> dict[str, Counter[str]]:
        """How many episodes are in which state, by environment."""
        result: dict[str, Counter[str]] = {}
        for episode in self._by_id.values():
            result.setdefault(episode.spec.task.env_key, Counter())[episode.state.value] += 1
        return result
