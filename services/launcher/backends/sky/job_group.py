"""Replicas as members of one managed Job Group per run.

The learner, whose end ends the group, and the gateways are declared with it. Rollouts join and
leave on their own, and so does a gateway that is started again.
"""

import asyncio
import time
from dataclasses import dataclass, field, replace

from services.launcher.backends.sky import names, status, tasks
from services.launcher.backends.sky.ports import Client
from services.launcher.backends.sky.queue import Board
from services.launcher.backends.sky.start import Start
from services.launcher.backends.sky.status import Job, Place, Stage
from services.launcher.ports import BackendError, CapacityError, SetupError, StartLostError
from services.launcher.state import LEARNER, Exit, Key

_UNKNOWN_S = 120.0
_KILLED = -9
_NONE = "nobody has such a machine now"
_CANCELLED_STAGES = (Stage.CANCELLED, Stage.ENDING)


class _CancelledError(StartLostError):
    """Somebody has cancelled its job, or its group has ended."""


@dataclass(slots=True)
class _Gathering:
    """The declared replicas of a run that wait for its learner."""

    starts: dict[Key, Start] = field(default_factory=dict[Key, Start])
    # Its id, and whether it declares them.
    group: asyncio.Future[tuple[int, bool]] = field(
        default_factory=asyncio.Future[tuple[int, bool]]
    )


class Groups:
    """Starts, watches and ends members of groups, by the names of their tasks.

    Replicas of one run are started in one turn: a learner waits for `gather_s` for its gateways,
    and who comes later joins as a member of its own.
    """

    def __init__(self, client: Client, board: Board, gather_s: float) -> None:
        self._client = client
        self._board = board
        self._gather_s = gather_s
        self._gathering: dict[str, _Gathering] = {}
        # Records of earlier starts under the same name do not count.
        self._since: dict[str, int] = {}
        self._killed: set[str] = set()
        # Jobs that nobody had machines for, and that were therefore cancelled.
        self._given_up: set[int] = set()
        # How long each may look for another machine, and since when those do that have none.
        self._limits: dict[str, float] = {}
        self._recovering: dict[str, float] = {}

    async def start(self, start: Start) -> None:
        """Returns when the replica's job runs."""
        self._killed.discard(start.name)
        self._recovering.pop(start.name, None)
        self._limits[start.name] = start.limit_s
        deadline = time.monotonic() + start.limit_s
        if tasks.is_static(start.key):
            return await self._until_running(start, await self._declared(start, deadline), deadline)
        while True:
            group = await self._group(start, deadline)
            try:
                job_id = await self._joined(start, group)
                return await self._until_running(start, job_id, deadline)
            except _CancelledError:
                await self._board.fresh()
                if await self._open(start) == group:
                    raise
                # It went with its group, for which perhaps nobody had machines: it comes with the
                # next.

    async def _declared(self, start: Start, deadline: float) -> int:
        """The id of the job whose records are of this start."""
        gathering = self._gathering.setdefault(start.launch.run_id, _Gathering())
        gathering.starts[start.key] = start
        if start.key[0] != LEARNER:
            return await self._with_learner(start, gathering, deadline)
        try:
            await asyncio.sleep(self._gather_s)
        finally:
            del self._gathering[start.launch.run_id]
        try:
            group, fresh = await self._group_of(start, gathering, deadline)
        except BaseException as error:
            # The gateways fail with it; a cancelled learner is no error of theirs.
            known = (
                error if isinstance(error, Exception) else StartLostError("the start was cancelled")
            )
            gathering.group.set_exception(known)
            # Perhaps nobody waits.
            gathering.group.exception()
            raise
        gathering.group.set_result((group, fresh))
        return group

    async def _group_of(
        self, learner: Start, gathering: _Gathering, deadline: float
    ) -> tuple[int, bool]:
        """The learner's group, and whether it was submitted now, with all that were gathered."""
        jobs, site = await self._board.fresh(), learner.site
        group = status.open_group(jobs, site.groups, site.learner)
        if group is not None:
            return group, False
        # A group whose learner has ended is ending itself.
        await self._client.cancel(status.live_groups(jobs, site.groups))
        while status.live_groups(await self._board.fresh(), site.groups):
            await self._in_time(learner, deadline, "its group of before does not end")
        documents = tasks.group(learner.site, list(gathering.starts), learner.launch.attempt)
        by_name = {each.name: each.secrets for each in gathering.starts.values()}
        secrets = [by_name[document["name"]] for document in documents[1:]]
        return await self._client.submit_group(documents, secrets), True

    async def _with_learner(self, start: Start, gathering: _Gathering, deadline: float) -> int:
        """Come with a learner that is being started, else join the group that is there."""
        while not gathering.group.done():
            if (LEARNER, 0) not in gathering.starts:
                group = await self._open(start)
                if group is not None and (LEARNER, 0) not in gathering.starts:
                    del gathering.starts[start.key]
                    return await self._again(start, group)
            if time.monotonic() > deadline:
                gathering.starts.pop(start.key, None)
                raise CapacityError(f"{start.name}: its run has no learner yet")
            await asyncio.wait({gathering.group}, timeout=self._board.poll_s)
        group, fresh = gathering.group.result()
        return group if fresh else await self._again(start, group)

    async def _again(self, start: Start, group: int) -> int:
        """A gateway of a group that goes on: its own job if that does, else a member that joins."""
        mine = status.newest(await self._board.fresh(), start.name, group)
        if mine is not None and mine.goes_on:
            return mine.job_id
        return await self._joined(start, group)

    async def _group(self, start: Start, deadline: float) -> int:
        """The run's group, once it is there."""
        while True:
            group = await self._open(start)
            if group is not None:
                # It may have ended since the last look.
                await self._board.fresh()
                if await self._open(start) == group:
                    return group
            await self._in_time(start, deadline, "its run has no learner yet")

    async def _open(self, start: Start) -> int | None:
        return status.open_group(await self._board.jobs(), start.site.groups, start.site.learner)

    async def _joined(self, start: Start, group: int) -> int:
        document = tasks.task(start.site, start.key, start.launch.attempt)
        try:
            return await self._client.submit_job(document, start.secrets, group)
        except BackendError as error:
            await self._board.fresh()
            if type(error) is BackendError and await self._open(start) != group:
                # Nothing is wrong with the wish: its learner has ended meanwhile.
                raise _CancelledError(f"{start.name}: its group has ended") from error
            raise

    async def _until_running(self, start: Start, since: int, deadline: float) -> None:
        self._since[start.name] = since
        jobs = await self._board.fresh()
        while True:
            job = status.newest(jobs, start.name, since)
            stage = job.stage if job is not None else Stage.WAITING
            if stage in (Stage.RUNNING, Stage.RECOVERING, Stage.DONE, Stage.FAILED):
                return
            if stage is not Stage.WAITING or time.monotonic() > deadline:
                await self._give_up(start, job, since)
            await self._board.pause()
            jobs = await self._board.jobs()

    async def _give_up(self, start: Start, job: Job | None, since: int) -> None:
        stage = job.stage if job is not None else Stage.WAITING
        missing = stage in (Stage.NO_CAPACITY, Stage.WAITING) or since in self._given_up
        if missing:
            # At first: others of its group see it cancelled, and are to know why.
            self._given_up.add(since)
        if job is None or not job.over:
            await self._client.cancel([since])
        reason = job.reason if job is not None else ""
        what = f"{start.name}: {reason or stage.value}"
        if missing:
            raise CapacityError(f"{what}; {_NONE}")
        if stage is Stage.REFUSED:
            raise BackendError(what)
        raise (_CancelledError if stage in _CANCELLED_STAGES else SetupError)(what)

    async def _in_time(self, start: Start, deadline: float, problem: str) -> None:
        if time.monotonic() > deadline:
            raise CapacityError(f"{start.name}: {problem}, after {start.limit_s:g} s")
        await self._board.pause()

    async def attach(self, name: str, limit_s: float) -> bool:
        """As `live`, and it may look for another machine for so long."""
        self._limits[name] = limit_s
        return await self.live(name)

    async def live(self, name: str) -> bool:
        """Whether a replica's job goes on; from now on its later records count."""
        job = status.newest(await self._board.fresh(), name)
        if job is None or job.over:
            return False
        self._since[name] = job.job_id
        return True

    async def place(self, name: str) -> Place | None:
        """Where a replica's machines are."""
        job = status.newest(await self._board.fresh(), name, self._since.get(name, 0))
        return job.place if job is not None else None

    async def undo(self, name: str) -> None:
        """End what a start has left."""
        if await self.live(name):
            await self.kill(name)
            await self.wait(name)
        elif job := status.newest(await self._board.jobs(), name):
            await self._forsake(job)

    async def _forsake(self, job: Job) -> None:
        """End what SkyPilot may have left of a job that is over."""
        if job.abandoned:
            await self._client.down(job.cluster)

    async def wait(self, name: str) -> Exit:
        """How the replica's job ended, once it has."""
        since, seen = self._since.get(name, 0), time.monotonic()
        while True:
            jobs = await self._board.jobs()
            job = status.newest(jobs, name, since)
            if name in self._killed:
                return Exit(_KILLED)
            if job is not None:
                seen = time.monotonic()
            if job is not None and job.over:
                await self._forsake(job)
                if since in self._given_up:
                    return Exit(1, _NONE, preempted=True)
                return replace(job.exit, preempted=status.went_with_group(jobs, job))
            if job is not None and self._in_vain(job):
                self._given_up.add(since)
                await self._client.cancel([job.job_id])
            if time.monotonic() > seen + _UNKNOWN_S:
                return Exit(1, "SkyPilot answers, and knows no such job")
            await self._board.pause()

    def _in_vain(self, job: Job) -> bool:
        """Whether nobody has machines for a job that goes on to ask: one that a dead launcher has
        asked for and would have given up, or one whose machine was taken away long ago."""
        if job.stage is not Stage.RECOVERING:
            self._recovering.pop(job.task, None)
            return job.stage is Stage.NO_CAPACITY
        began = self._recovering.setdefault(job.task, time.monotonic())
        limit_s = self._limits.get(job.task, float("inf"))
        # With a declared gateway its learner would go, which may be at work.
        return not _is_bound(job) and time.monotonic() > began + limit_s

    async def drain(self, name: str) -> None:
        """Its watcher is told by the launcher; what has no machine yet is not waited for."""
        job = status.newest(await self._board.fresh(), name, self._since.get(name, 0))
        if job is None or job.stage in (Stage.WAITING, Stage.NO_CAPACITY):
            await self.kill(name)

    async def kill(self, name: str) -> None:
        await self._client.forget(lambda asked: asked == name)
        job = status.newest(await self._board.fresh(), name, self._since.get(name, 0))
        if job is None or job.over:
            return
        if _is_bound(job) and job.cluster:
            # It cannot be cancelled alone. SkyPilot finds it another machine.
            await self._client.down(job.cluster)
            self._killed.add(name)
        else:
            await self._client.cancel([job.job_id])


def _is_bound(job: Job) -> bool:
    """Whether it cannot be cancelled without its group: others are declared with it."""
    owned = names.parse(job.task)
    learner = owned is not None and owned.key == (LEARNER, 0)
    return job.name != job.task and not learner
