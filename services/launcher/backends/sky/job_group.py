"""Replicas as members of one managed Job Group per run.

The learner, whose end ends the group, and the gateways are declared with it. Rollouts join and
leave on their own, and so does a gateway that is started again."""

import asyncio
import time
from dataclasses import dataclass, field, replace

from services.launcher.backends.ports import BackendError, CapacityError, SetupError, StartLostError
from services.launcher.backends.sky import names, status, task_documents
from services.launcher.backends.sky.job_queue import JobQueue
from services.launcher.backends.sky.ports import SkyPilotApi
from services.launcher.backends.sky.prepared_launch import PreparedLaunch
from services.launcher.backends.sky.status import Job, JobStage, Place
from services.launcher.state import LEARNER, ExitStatus, ReplicaKey

_UNKNOWN_S = 120.0
_KILLED = -9
_NO_MACHINE = "no such machine is available now"
_CANCELLED_STAGES = (JobStage.CANCELLED, JobStage.ENDING)


class _CancelledError(StartLostError):
    """Another party cancelled the job, or its group has ended."""


@dataclass(slots=True)
class _PendingGroup:
    """Declared replicas of a run that wait for its learner."""

    starts: dict[ReplicaKey, PreparedLaunch] = field(
        default_factory=dict[ReplicaKey, PreparedLaunch]
    )
    # Its id, and whether it declares them.
    group: asyncio.Future[tuple[int, bool]] = field(
        default_factory=asyncio.Future[tuple[int, bool]]
    )


class JobGroupManager:
    """Manager of group members: starts, watches and ends them by the names of their tasks.

    Replicas of one run are started in one turn: a learner waits for `gather_s` for its
    gateways, and a later one joins as a member of its own."""

    def __init__(self, client: SkyPilotApi, board: JobQueue, gather_s: float) -> None:
        self._client = client
        self._board = board
        self._gather_s = gather_s
        self._gathering: dict[str, _PendingGroup] = {}
        # Records of earlier starts under the same name do not count.
        self._since: dict[str, int] = {}
        self._killed: set[str] = set()
        # Jobs that were cancelled because no machine was available.
        self._given_up: set[int] = set()
        # Limit of each replica's search for another machine, and the start of each search.
        self._limits: dict[str, float] = {}
        self._recovering: dict[str, float] = {}

    async def start_replica(self, start: PreparedLaunch) -> None:
        """Start the replica; return when its job runs."""
        self._killed.discard(start.name)
        self._recovering.pop(start.name, None)
        self._limits[start.name] = start.limit_s
        deadline = time.monotonic() + start.limit_s
        if task_documents.is_static(start.key):
            return await self._wait_until_running(
                start, await self._submit_declared(start, deadline), deadline
            )
        while True:
            group = await self._wait_for_group(start, deadline)
            try:
                job_id = await self._join_group(start, group)
                return await self._wait_until_running(start, job_id, deadline)
            except _CancelledError:
                await self._board.fresh_jobs()
                if await self._find_open_group(start) == group:
                    raise
                # The job ended with its group, perhaps for lack of machines: join the next.

    async def _submit_declared(self, start: PreparedLaunch, deadline: float) -> int:
        """Submit a declared replica; return the id of the job whose records are of this start."""
        gathering = self._gathering.setdefault(start.launch.run_id, _PendingGroup())
        gathering.starts[start.key] = start
        if start.key[0] != LEARNER:
            return await self._start_with_learner(start, gathering, deadline)
        try:
            await asyncio.sleep(self._gather_s)
        finally:
            del self._gathering[start.launch.run_id]
        try:
            group, fresh = await self._find_or_submit_group(start, gathering, deadline)
        except BaseException as error:
            # The gateways fail with the learner, but not with its cancellation.
            known = (
                error if isinstance(error, Exception) else StartLostError("the start was cancelled")
            )
            gathering.group.set_exception(known)
            # Retrieved here in case no gateway waits.
            gathering.group.exception()
            raise
        gathering.group.set_result((group, fresh))
        return group

    async def _find_or_submit_group(
        self, learner: PreparedLaunch, gathering: _PendingGroup, deadline: float
    ) -> tuple[int, bool]:
        """Return the learner's group, and whether it was submitted now, with all that were
        gathered."""
        jobs, site = await self._board.fresh_jobs(), learner.site
        group = status.find_open_group(jobs, site.group_names, site.learner_name)
        if group is not None:
            return group, False
        # A group whose learner has ended is ending itself.
        await self._client.cancel_jobs(status.find_live_groups(jobs, site.group_names))
        while status.find_live_groups(await self._board.fresh_jobs(), site.group_names):
            await self._pause_before_deadline(learner, deadline, "its earlier group does not end")
        documents = task_documents.job_group_tasks(
            learner.site, list(gathering.starts), learner.launch.attempt
        )
        by_name = {each.name: each.secrets for each in gathering.starts.values()}
        secrets = [by_name[document["name"]] for document in documents[1:]]
        return await self._client.submit_group(documents, secrets), True

    async def _start_with_learner(
        self, start: PreparedLaunch, gathering: _PendingGroup, deadline: float
    ) -> int:
        """Start with a learner that is being started, else join the group that is there."""
        while not gathering.group.done():
            if (LEARNER, 0) not in gathering.starts:
                group = await self._find_open_group(start)
                if group is not None and (LEARNER, 0) not in gathering.starts:
                    del gathering.starts[start.key]
                    return await self._rejoin_group(start, group)
            if time.monotonic() > deadline:
                gathering.starts.pop(start.key, None)
                raise CapacityError(f"{start.name}: its run has no learner yet")
            await asyncio.wait({gathering.group}, timeout=self._board.poll_s)
        group, fresh = gathering.group.result()
        return group if fresh else await self._rejoin_group(start, group)

    async def _rejoin_group(self, start: PreparedLaunch, group: int) -> int:
        """Return a gateway's own job in a group that is still active, else join as a new
        member."""
        mine = status.newest_job(await self._board.fresh_jobs(), start.name, group)
        if mine is not None and mine.goes_on:
            return mine.job_id
        return await self._join_group(start, group)

    async def _wait_for_group(self, start: PreparedLaunch, deadline: float) -> int:
        while True:
            group = await self._find_open_group(start)
            if group is not None:
                # It may have ended since the last look.
                await self._board.fresh_jobs()
                if await self._find_open_group(start) == group:
                    return group
            await self._pause_before_deadline(start, deadline, "its run has no learner yet")

    async def _find_open_group(self, start: PreparedLaunch) -> int | None:
        return status.find_open_group(
            await self._board.recent_jobs(), start.site.group_names, start.site.learner_name
        )

    async def _join_group(self, start: PreparedLaunch, group: int) -> int:
        document = task_documents.replica_task(start.site, start.key, start.launch.attempt)
        try:
            return await self._client.submit_job(document, start.secrets, group)
        except BackendError as error:
            await self._board.fresh_jobs()
            if type(error) is BackendError and await self._find_open_group(start) != group:
                # The request is valid, but its learner has ended meanwhile.
                raise _CancelledError(f"{start.name}: its group has ended") from error
            raise

    async def _wait_until_running(self, start: PreparedLaunch, since: int, deadline: float) -> None:
        self._since[start.name] = since
        jobs = await self._board.fresh_jobs()
        while True:
            job = status.newest_job(jobs, start.name, since)
            stage = job.stage if job is not None else JobStage.WAITING
            if stage in (JobStage.RUNNING, JobStage.RECOVERING, JobStage.DONE, JobStage.FAILED):
                return
            if stage is not JobStage.WAITING or time.monotonic() > deadline:
                await self._give_up_start(start, job, since)
            await self._board.pause_between_polls()
            jobs = await self._board.recent_jobs()

    async def _give_up_start(self, start: PreparedLaunch, job: Job | None, since: int) -> None:
        stage = job.stage if job is not None else JobStage.WAITING
        missing = stage in (JobStage.NO_CAPACITY, JobStage.WAITING) or since in self._given_up
        if missing:
            # Recorded before the cancellation, which the rest of its group sees.
            self._given_up.add(since)
        if job is None or not job.over:
            await self._client.cancel_jobs([since])
        reason = job.reason if job is not None else ""
        what = f"{start.name}: {reason or stage.value}"
        if missing:
            raise CapacityError(f"{what}; {_NO_MACHINE}")
        if stage is JobStage.REFUSED:
            raise BackendError(what)
        raise (_CancelledError if stage in _CANCELLED_STAGES else SetupError)(what)

    async def _pause_before_deadline(
        self, start: PreparedLaunch, deadline: float, problem: str
    ) -> None:
        if time.monotonic() > deadline:
            raise CapacityError(f"{start.name}: {problem}, after {start.limit_s:g} s")
        await self._board.pause_between_polls()

    async def attach_replica(self, name: str, limit_s: float) -> bool:
        """Attach as `is_live` does, and let the replica look for another machine for so long."""
        self._limits[name] = limit_s
        return await self.is_live(name)

    async def is_live(self, name: str) -> bool:
        """Return whether a replica's job is active; from now on its later records count."""
        job = status.newest_job(await self._board.fresh_jobs(), name)
        if job is None or job.over:
            return False
        self._since[name] = job.job_id
        return True

    async def find_place(self, name: str) -> Place | None:
        """Return where a replica's machines are."""
        job = status.newest_job(await self._board.fresh_jobs(), name, self._since.get(name, 0))
        return job.place if job is not None else None

    async def undo_start(self, name: str) -> None:
        """End what a start has left."""
        if await self.is_live(name):
            await self.kill_replica(name)
            await self.wait_for_exit(name)
        elif job := status.newest_job(await self._board.recent_jobs(), name):
            await self._clean_abandoned(job)

    async def _clean_abandoned(self, job: Job) -> None:
        """End what SkyPilot may have left of a job that is over."""
        if job.abandoned:
            await self._client.tear_down_cluster(job.cluster)

    async def wait_for_exit(self, name: str) -> ExitStatus:
        """Wait until the replica's job has ended; return how."""
        since, seen = self._since.get(name, 0), time.monotonic()
        while True:
            jobs = await self._board.recent_jobs()
            job = status.newest_job(jobs, name, since)
            if name in self._killed:
                return ExitStatus(_KILLED)
            if job is not None:
                seen = time.monotonic()
            if job is not None and job.over:
                await self._clean_abandoned(job)
                if since in self._given_up:
                    return ExitStatus(1, _NO_MACHINE, preempted=True)
                return replace(job.exit, preempted=status.went_with_group(jobs, job))
            if job is not None and self._is_hopeless(job):
                self._given_up.add(since)
                await self._client.cancel_jobs([job.job_id])
            if time.monotonic() > seen + _UNKNOWN_S:
                return ExitStatus(1, "SkyPilot answers, and knows no such job")
            await self._board.pause_between_polls()

    def _is_hopeless(self, job: Job) -> bool:
        """Return whether a job keeps requesting machines in vain: one that a dead launcher would
        have given up, or one whose machine was preempted long ago."""
        if job.stage is not JobStage.RECOVERING:
            self._recovering.pop(job.task, None)
            return job.stage is JobStage.NO_CAPACITY
        began = self._recovering.setdefault(job.task, time.monotonic())
        limit_s = self._limits.get(job.task, float("inf"))
        # A declared gateway would take its learner with it, which may be at work.
        return not _is_bound_to_group(job) and time.monotonic() > began + limit_s

    async def drain_replica(self, name: str) -> None:
        """Cancel a start that has no machine yet, without waiting. The launcher itself notifies the
        watcher of a running replica."""
        job = status.newest_job(await self._board.fresh_jobs(), name, self._since.get(name, 0))
        if job is None or job.stage in (JobStage.WAITING, JobStage.NO_CAPACITY):
            await self.kill_replica(name)

    async def kill_replica(self, name: str) -> None:
        await self._client.cancel_pending(lambda replica: replica == name)
        job = status.newest_job(await self._board.fresh_jobs(), name, self._since.get(name, 0))
        if job is None or job.over:
            return
        if _is_bound_to_group(job) and job.cluster:
            # The job cannot be cancelled alone; SkyPilot finds it another machine.
            await self._client.tear_down_cluster(job.cluster)
            self._killed.add(name)
        else:
            await self._client.cancel_jobs([job.job_id])


def _is_bound_to_group(job: Job) -> bool:
    """Return whether the job cannot be cancelled without its group: others are declared with
    it."""
    owned = names.parse_name(job.task)
    learner = owned is not None and owned.key == (LEARNER, 0)
    return job.name != job.task and not learner
