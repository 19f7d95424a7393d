"""Which weights every attached engine should serve, and which it says it serves. No protobuf.

One stream per worker. A stream that is cut ends the membership after a grace period, unless
the worker attaches again first; a newer stream of a worker ends the older one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.learner.guard.types import Probe
from services.learner.types import PolicyId, Publication

# Publications whose canary is kept, for reports that come late: a worker that is slow to load
# must not be told that its weights are wrong.
_REMEMBERED = 1024
# A worker that failed to load gets the newest policy again after this.
_RETRY_S = 1.0
# Largest difference of a canary logprob between engine and trainer.
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


class UnknownWorkerError(KeyError):
    """The worker is not attached."""


class NoCommonTransportError(ValueError):
    """The worker can load by none of the learner's transports."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A publication under its name, and what engines are to sample once they serve it."""

    policy: PolicyId
    publication: Publication
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """One worker's order to load a publication; by shared memory or through WeightService."""

    announcement: Announcement
    by_shm: bool
    # Also what the engine serves already.
    reload: bool = False


@dataclass(slots=True)
class Member:
    """One attached worker."""

    worker_id: str
    incarnation: str
    devices: int
    shares_memory: bool
    can_fetch: bool
    holding: PolicyId | None = None
    sent: PolicyId | None = None
    # The next update goes through WeightService: a late joiner, or shared memory failed.
    fetch_next: bool = True
    # Whatever the engine holds is not to be trusted.
    reload_next: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False


class Broadcast:
    """The members, and the newest policy."""

    def __init__(self, *, canary_tolerance: float, attach_grace_s: float) -> None:
        self.newest: Announcement | None = None
        # Called with (worker_id) when a worker's membership ends.
        self.on_left: Callable[[str], None] = _ignore
        # From the last announcement until every member served it; None while some do not.
        self.sync_seconds: float | None = None
        self._tolerance = canary_tolerance
        self._grace_s = attach_grace_s
        self._members: dict[str, Member] = {}
        self._canaries: dict[PolicyId, NDArray[np.float32]] = {}
        self._announced_at = 0.0

    def attach(self, member: Member) -> None:
        """Make a stream its worker's current one. Raises NoCommonTransportError."""
        if not (member.shares_memory or member.can_fetch):
            raise NoCommonTransportError(
                f"{member.worker_id} shares no memory with the learner and cannot fetch"
            )
        if old := self._members.get(member.worker_id):
            old.ended = True
            old.wake.set()
        self._members[member.worker_id] = member

    def left(self, member: Member) -> None:
        """A stream was cut; its worker has `attach_grace_s` to come back."""
        member.ended = True
        asyncio.get_running_loop().call_later(self._grace_s, self._end, member)

    def close(self) -> None:
        """End every stream, for a server that stops."""
        for member in self._members.values():
            member.ended = True
            member.wake.set()

    async def next_update(self, member: Member, timeout_s: float) -> Update | None:
        """Wait for something to load; None when the stream should end."""
        try:
            async with asyncio.timeout(timeout_s):
                while not member.ended:
                    member.wake.clear()
                    if update := self._pending(member):
                        return update
                    await member.wake.wait()
        except TimeoutError:
            return None
        return None

    def announce(self, announcement: Announcement) -> None:
        """Tell every member to load a publication."""
        self.newest = announcement
        self._announced_at = asyncio.get_running_loop().time()
        self.sync_seconds = None
        self._canaries[announcement.policy] = announcement.publication.canary_logprobs
        for policy in sorted(self._canaries)[:-_REMEMBERED]:
            del self._canaries[policy]
        for member in self._members.values():
            member.wake.set()

    def applied(self, worker_id: str, policy: PolicyId, canary: NDArray[np.float32]) -> bool:
        """A member serves a policy; False when its canary disagrees with the trainer's."""
        member = self._member(worker_id)
        expected = self._canaries.get(policy)
        if expected is None or not self._agrees(expected, canary):
            self._retry(member)
            return False
        member.holding = policy
        self._note_sync()
        return True

    def check_member(self, worker_id: str) -> None:
        """Raises UnknownWorkerError."""
        self._member(worker_id)

    def refused(self, worker_id: str) -> None:
        """What a member serves is wrong: it gets the newest policy again, whole."""
        self._retry(self._member(worker_id))

    def resync(self) -> None:
        """Every member gets the newest policy again, whole, at once."""
        for member in self._members.values():
            _forget_what_it_holds(member)

    def failed(self, worker_id: str) -> None:
        """A member could not load: it gets the newest policy again, whole."""
        self._retry(self._member(worker_id))

    def absent(self, policy: PolicyId) -> list[str]:
        """Members that do not serve a policy or a newer one."""
        members = self._members.values()
        return [m.worker_id for m in members if m.holding is None or m.holding < policy]

    def _agrees(self, expected: NDArray[np.float32], canary: NDArray[np.float32]) -> bool:
        if expected.shape != canary.shape:
            return False
        return bool((np.abs(expected - canary) <= self._tolerance).all())

    def _pending(self, member: Member) -> Update | None:
        newest = self.newest
        if newest is None or newest.policy in (member.sent, member.holding):
            return None
        by_shm = member.shares_memory and not (member.fetch_next and member.can_fetch)
        update = Update(newest, by_shm, member.reload_next)
        member.sent, member.fetch_next, member.reload_next = newest.policy, False, False
        return update

    def _retry(self, member: Member) -> None:
        asyncio.get_running_loop().call_later(_RETRY_S, _forget_what_it_holds, member)

    def _note_sync(self) -> None:
        newest = self.newest
        if newest and self.sync_seconds is None and not self.absent(newest.policy):
            self.sync_seconds = asyncio.get_running_loop().time() - self._announced_at

    def _member(self, worker_id: str) -> Member:
        member = self._members.get(worker_id)
        if member is None:
            raise UnknownWorkerError(f"{worker_id} is not attached")
        return member

    def _end(self, member: Member) -> None:
        if self._members.get(member.worker_id) is member:
            del self._members[member.worker_id]
            self.on_left(member.worker_id)


def _forget_what_it_holds(member: Member) -> None:
    member.sent, member.holding = None, None
    member.fetch_next = member.reload_next = True
    member.wake.set()


def _ignore(worker_id: str) -> None:
    """Nobody counts members."""
