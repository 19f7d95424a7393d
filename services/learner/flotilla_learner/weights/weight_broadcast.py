"""Broadcast of policies: the weights that every attached engine should serve, and those that it
reports to serve. No protobuf.

One stream per worker. A broken stream ends the membership after a grace period, unless the
worker attaches again first; a newer stream of a worker ends the older one."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc.deadlines import loop_time
from flotilla_learner.guard.probes import Probe
from flotilla_learner.types import Publication
from flotilla_learner.weights.attached_worker import AttachedWorker
from flotilla_learner.weights.transfer_choice import choose_transport

# Publications whose canary is kept, for late reports: a worker that is slow to load must not be
# refused as wrong.
_REMEMBERED = 1024
# A worker that failed to load gets the newest policy again after this.
_RETRY_S = 1.0


class UnknownWorkerError(KeyError):
    """The worker is not attached."""


class NoCommonTransportError(ValueError):
    """The worker supports none of the learner's transports."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A publication under its name, and the probes for engines that serve it."""

    policy: PolicyId
    publication: Publication
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One worker's order to load a publication: by shared memory `shm`, through WeightService
    `grpc`, or as it is sent into the engine over `gloo`, `nccl` or `ipc`."""

    announcement: Announcement
    transport: str
    # Load it even if the engine already serves it.
    reload: bool = False
    # Keep its bytes, because the next may come as a difference.
    keep: bool = False


class WeightBroadcast:
    """Attached workers, and the newest policy."""

    def __init__(
        self,
        *,
        canary_tolerance: float,
        attach_grace_s: float,
        can_send: Callable[[PolicyId, frozenset[str]], bool] | None = None,
    ) -> None:
        """Create a broadcast without workers; `canary_tolerance` is the largest difference of a
        canary's logprob between engine and trainer, `can_send` returns True if a policy can be
        sent, through memory of these devices."""
        self._can_send = can_send
        self.newest: Announcement | None = None
        # Called with (worker_id) when a worker's membership ends.
        self.on_left: Callable[[str], None] = lambda _: None
        # From the last announcement until every member served it; None until then.
        self.sync_seconds: float | None = None
        self._tolerance = canary_tolerance
        self._grace_s = attach_grace_s
        self._members: dict[str, AttachedWorker] = {}
        self._canaries: dict[PolicyId, NDArray[np.float32]] = {}
        self._announced_at = 0.0

    def attach_worker(self, member: AttachedWorker) -> None:
        """Make a stream its worker's current one. Raises NoCommonTransportError."""
        if not (member.shares_memory or member.can_fetch):
            raise NoCommonTransportError(
                f"{member.worker_id} shares no memory with the learner and cannot fetch"
            )
        if old := self._members.get(member.worker_id):
            old.ended = True
            old.wake.set()
        self._members[member.worker_id] = member

    def note_stream_cut(self, member: AttachedWorker) -> None:
        """Record a broken stream; its worker has `attach_grace_s` to come back."""
        member.ended = True
        asyncio.get_running_loop().call_later(self._grace_s, self._end_membership, member)

    def close(self) -> None:
        """End every stream, when the server stops."""
        for member in self._members.values():
            member.ended = True
            member.wake.set()

    async def next_update(self, member: AttachedWorker, timeout_s: float) -> WeightUpdate | None:
        """Wait for something to load; return None if the stream should end."""
        try:
            async with asyncio.timeout(timeout_s):
                while not member.ended:
                    member.wake.clear()
                    if update := self._pending_update(member):
                        return update
                    await member.wake.wait()
        except TimeoutError:
            return None
        return None

    def announce_policy(self, announcement: Announcement) -> None:
        """Order every member to load a publication."""
        self.newest = announcement
        self._announced_at = loop_time()
        self.sync_seconds = None
        self._canaries[announcement.policy] = announcement.publication.canary_logprobs
        for policy in sorted(self._canaries)[:-_REMEMBERED]:
            del self._canaries[policy]
        for member in self._members.values():
            member.wake.set()

    def verify_canary(self, worker_id: str, policy: PolicyId, canary: NDArray[np.float32]) -> bool:
        """Record that a member serves a policy.

        Return False if its canary disagrees with the trainer's."""
        member = self._find_worker(worker_id)
        expected = self._canaries.get(policy)
        if expected is None or not self._canary_agrees(expected, canary):
            return False
        member.holding = policy
        self._note_sync()
        return True

    def check_attached(self, worker_id: str) -> None:
        """Check that a worker is attached. Raises UnknownWorkerError."""
        self._find_worker(worker_id)

    def resync_all(self) -> None:
        """Send every member the newest policy again, whole, at once."""
        for member in self._members.values():
            _forget_holding(member)

    def note_failed(self, worker_id: str) -> None:
        """Record that a member could not load, or serves wrong weights: it gets the newest policy
        again, whole."""
        member = self._find_worker(worker_id)
        asyncio.get_running_loop().call_later(_RETRY_S, _forget_holding, member)

    def list_absent(self, policy: PolicyId) -> list[str]:
        """List the members that do not serve a policy or a newer one."""
        members = self._members.values()
        return [m.worker_id for m in members if m.holding is None or m.holding < policy]

    def _canary_agrees(self, expected: NDArray[np.float32], canary: NDArray[np.float32]) -> bool:
        if expected.shape != canary.shape:
            return False
        return bool((np.abs(expected - canary) <= self._tolerance).all())

    def _pending_update(self, member: AttachedWorker) -> WeightUpdate | None:
        newest = self.newest
        if newest is None or newest.policy in (member.sent, member.holding):
            return None
        update = WeightUpdate(
            newest,
            choose_transport(member, newest.policy, self._can_send),
            member.reload_next,
            member.fetches_changes,
        )
        member.sent, member.fetch_next, member.reload_next = newest.policy, False, False
        return update

    def _note_sync(self) -> None:
        newest = self.newest
        if newest and self.sync_seconds is None and not self.list_absent(newest.policy):
            self.sync_seconds = loop_time() - self._announced_at

    def _find_worker(self, worker_id: str) -> AttachedWorker:
        member = self._members.get(worker_id)
        if member is None:
            raise UnknownWorkerError(f"{worker_id} is not attached")
        return member

    def _end_membership(self, member: AttachedWorker) -> None:
        if self._members.get(member.worker_id) is member:
            del self._members[member.worker_id]
            self.on_left(member.worker_id)


def _forget_holding(member: AttachedWorker) -> None:
    member.sent, member.holding = None, None
    member.fetch_next = member.reload_next = True
    member.wake.set()
