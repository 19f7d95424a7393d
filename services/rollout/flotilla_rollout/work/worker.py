"""A worker that turns leases into trajectories, and holds no state that a restart would lose."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from flotilla_common.aio.concurrency import cancel_tasks, run_until_first
from flotilla_common.domain.attempts import AttemptKey, FailureKind, Purpose
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.telemetry import trace
from flotilla_common.telemetry.log import bind, get_logger
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_rollout.episodes.attempt_record import AttemptState, make_failed_trajectory
from flotilla_rollout.episodes.episode import Attempt, AttemptRunner
from flotilla_rollout.ports import EngineDead, Learner, LearnerRefused, LeaseLost
from flotilla_rollout.types import Lease, LeasedAttempt, Sampling
from flotilla_rollout.work.options import WorkerOptions
from flotilla_rollout.work.worker_totals import WorkerTotals

# A learner that answers an empty poll at once must not be polled in a tight loop.
EMPTY_POLL_PAUSE_S = 0.05
RELEASE_TIMEOUT_S = 5.0
WAIT_PAUSE_S = 0.5

log = get_logger(__name__)


class Worker:
    """Taker of group leases while there is room; it runs their attempts concurrently and submits
    each.

    A group larger than the free room runs whole if the learner grants it: the learner does so only
    for an idle worker, and the engine queues attempts beyond its own limit. `settled` waits while
    the engine's newest weights are still being judged. While the engine `waits` for its service, no
    try begins: it could only fail."""

    def __init__(
        self,
        learner: Learner,
        runner: AttemptRunner,
        policy: Callable[[], PolicyId | None],
        options: WorkerOptions,
        watchdog: Watchdog | None = None,
        *,
        settled: Callable[[], Awaitable[object]] | None = None,
        waits: Callable[[], bool] | None = None,
    ) -> None:
        self._watchdog = watchdog or Watchdog()
        self._learner = learner
        self._runner = runner
        self._policy = policy
        self._settled = settled
        self._waits = waits or (lambda: False)
        self._options = options
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._capacity_freed = asyncio.Event()
        self._interval_s = options.renew_interval_s
        # Attempts of each lease that are running or about to run.
        self._live: dict[str, int] = {}
        # Done once the learner has refused even the report of a refusal.
        self._refused: asyncio.Future[None] = asyncio.Future()
        self.totals = WorkerTotals()

    @property
    def lease_count(self) -> int:
        return len(self._groups)

    @property
    def running_attempts(self) -> int:
        return sum(self._live.values())

    async def run_until_drained(self, drain: asyncio.Event) -> None:
        """Work until `drain` is set, then release all leases. Raises LearnerRefused."""
        try:
            await run_until_first(
                self._keep_leasing(), self._keep_renewing(), self._wait_for_refusal(), drain.wait()
            )
        finally:
            await self._release_all_leases()

    async def _wait_for_refusal(self) -> None:
        await self._refused

    async def _keep_leasing(self) -> None:
        while True:
            policy = self._policy()
            free = self._options.max_attempts - self.running_attempts
            if free < 1 or policy is None:
                await self._wait_for_capacity()
                continue
            with self._watchdog.stage("lease"):
                lease = await self._learner.lease_group(policy, free)
            if lease is None:
                await asyncio.sleep(EMPTY_POLL_PAUSE_S)
            else:
                self._start_group(lease)

    async def _wait_for_capacity(self) -> None:
        self._capacity_freed.clear()
        try:
            # The policy may arrive without any other event here.
            # Not wait_for, which loses a cancellation that comes together with the event.
            async with asyncio.timeout(0.2):
                await self._capacity_freed.wait()
        except TimeoutError:
            return

    def _start_group(self, lease: Lease) -> None:
        self.totals.leases += 1
        self._live[lease.lease_id] = len(lease.attempts)
        self._interval_s = min(self._options.renew_interval_s, lease.lease_ttl_s / 3)
        task = asyncio.create_task(self._run_group(lease))
        self._groups[lease.lease_id] = task
        task.add_done_callback(lambda ended: self._group_ended(lease, ended))

    def _group_ended(self, lease: Lease, task: asyncio.Task[None]) -> None:
        del self._groups[lease.lease_id]
        del self._live[lease.lease_id]
        self._capacity_freed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("group failed", lease=lease.lease_id, error=repr(error))

    def _attempt_ended(self, lease: Lease) -> None:
        self._live[lease.lease_id] -= 1
        self._capacity_freed.set()

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if not self._groups:
                continue
            for lease_id in await self._learner.renew_leases(list(self._groups)):
                self._drop_group(lease_id)

    def _drop_group(self, lease_id: str) -> None:
        task = self._groups.get(lease_id)
        if task is not None and not task.cancelling():
            self.totals.lost_leases += 1
            log.warning("lease lost", lease=lease_id)
            task.cancel()

    async def _run_group(self, lease: Lease) -> None:
        """Run all attempts of a lease together; release it if the group could not be completed."""
        bind(group_id=lease.group_id)
        end = time.monotonic() + lease.group_deadline_s
        attempts = [
            asyncio.create_task(self._run_attempt(lease, leased, end)) for leased in lease.attempts
        ]
        for attempt in attempts:
            attempt.add_done_callback(lambda _: self._attempt_ended(lease))
        complete = False
        try:
            for ended in asyncio.as_completed(attempts):
                # A complete group does not need its other attempts.
                if complete := await ended:
                    break
        except LeaseLost as error:
            log.warning("lease lost", lease=lease.lease_id, reason=str(error))
            self.totals.lost_leases += 1
        except LearnerRefused as error:
            log.exception("the learner refuses this worker", reason=str(error))
            if not self._refused.done():
                self._refused.set_exception(error)
        except EngineDead as error:
            log.warning("engine died", lease=lease.lease_id, reason=str(error))
        finally:
            await cancel_tasks(attempts)
        if not complete:
            await self._learner.release_leases([lease.lease_id])

    async def _run_attempt(self, lease: Lease, leased: LeasedAttempt, end: float) -> bool:
        """Try until graded, out of tries or out of time; return True if it completed the group."""
        complete = False
        # An earlier lease may have used the tries before; `max_tries` is for all leases.
        for failures, number in enumerate(range(leased.next_try, lease.max_tries), 1):
            first = number == leased.next_try
            # One trace from here through the gateway's calls to the learner's receipt.
            with trace.span("attempt", _make_span_attributes(lease, leased, number)):
                trajectory = await self._run_try(lease, leased, number, end, first=first)
                if trajectory is None:
                    return complete
                complete, counts = await self._submit_try(lease, trajectory, end)
            if counts or complete:
                return complete
            await asyncio.sleep(choose_pause(self._options.retry_pause_s, failures))
        return complete

    async def _submit_try(
        self, lease: Lease, trajectory: Trajectory, end: float
    ) -> tuple[bool, bool]:
        """Submit a try; return whether it completed the group, and whether no other try follows.

        A refused submission is reported as such, and never played again: attempts repeated until
        the learner takes them would be a biased selection. If the learner refuses that report too,
        it refuses the worker."""
        if self._settled is not None:
            # Submit nothing by weights that may still turn out to be wrong.
            await self._settled()
        left = max(end - time.monotonic(), 0.0)
        try:
            complete = await self._learner.submit_trajectory(lease, trajectory, left)
        except LearnerRefused as error:
            log.exception("submission refused", lease=lease.lease_id, reason=str(error))
            trajectory = make_failed_trajectory(
                trajectory.key, AttemptState(0.0), FailureKind.REFUSED_BY_LEARNER, str(error)
            )
            complete = await self._learner.submit_trajectory(lease, trajectory, left)
        kind = trajectory.failure
        return complete, kind is None or kind.spoils_group

    async def _run_try(
        self, lease: Lease, leased: LeasedAttempt, number: int, end: float, *, first: bool
    ) -> Trajectory | None:
        """Run one try; return None if there is no time, or these weights are no longer the
        lease's."""
        while self._waits() and time.monotonic() < end:  # noqa: ASYNC110 (nothing tells its end)
            await asyncio.sleep(WAIT_PAUSE_S)
        left = end - time.monotonic()
        if left <= 0 or not self._may_serve(lease):
            return None
        attempt = Attempt(
            key=AttemptKey(lease.group_id, leased.attempt_index, number),
            task_json=lease.task_json,
            sampling=Sampling(lease.temperature, leased.seed, lease.top_p, lease.top_k),
            opening=len(lease.attempts) if first else 1,
            budget_s=min(left, self._options.attempt_timeout_s * 2),
        )
        trajectory = await self._play_attempt(attempt)
        self._count_try(trajectory)
        return trajectory if self._is_wanted(lease, trajectory) else None

    async def _play_attempt(self, attempt: Attempt) -> Trajectory:
        try:
            return await self._runner.run_attempt(attempt)
        except EngineDead:
            raise
        except Exception as error:
            # Our own bug in one attempt must not end the others: it is recorded as a failed try,
            # with the stack in the log.
            key = attempt.key
            log.exception("attempt failed", group=key.group_id, index=key.attempt_index)
            return make_failed_trajectory(key, AttemptState(0.0), FailureKind.ABORTED, repr(error))

    def _may_serve(self, lease: Lease) -> bool:
        policy = self._policy()
        if policy is None:
            return False
        if lease.exact_policy is not None:
            return policy == lease.exact_policy
        return lease.min_policy is None or policy >= lease.min_policy

    def _is_wanted(self, lease: Lease, trajectory: Trajectory) -> bool:
        """Return False for an evaluation of one policy that another wrote, even in part."""
        if lease.purpose is not Purpose.EVAL or lease.exact_policy is None:
            return True
        return all(span.policy in (None, lease.exact_policy) for span in trajectory.spans)

    def _count_try(self, trajectory: Trajectory) -> None:
        self.totals.count_trajectory(trajectory)
        if (kind := trajectory.failure) is not None:
            key = trajectory.key
            place = {"group": key.group_id, "index": key.attempt_index, "number": key.attempt_try}
            log.warning("try failed", **place, kind=kind, detail=trajectory.detail)

    async def _release_all_leases(self) -> None:
        """Release every lease at once, before closing the episodes, so that others may begin."""
        held = list(self._groups)
        closing = asyncio.create_task(cancel_tasks(list(self._groups.values())))
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                if held:
                    await self._learner.release_leases(held)
                await self._learner.withdraw_poll()
        except (TimeoutError, LearnerRefused) as error:
            log.warning("leases not released, they expire", leases=len(held), reason=str(error))
        await closing


def _make_span_attributes(lease: Lease, leased: LeasedAttempt, number: int) -> dict[str, str | int]:
    return {
        "group_id": lease.group_id,
        "attempt_index": leased.attempt_index,
        "try": number,
        "purpose": lease.purpose,
    }


def choose_pause(first_s: float, failures: int) -> float:
    """Return the seconds to pause after so many failed tries: doubled after each, with jitter, so
    that attempts that failed together do not retry together."""
    return first_s * 2 ** (failures - 1) * random.uniform(0.5, 1.0)
