"""Execution of actions on each replica: start or take over, follow, drain, kill.

Requests to an unreachable backend are retried until it answers; meanwhile nothing is concluded
about its replicas."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from flotilla_common.telemetry import log
from flotilla_launcher import clock
from flotilla_launcher.backends.ports import (
    Backend,
    BackendError,
    BackendUnreachable,
    CapacityError,
    LaunchSpec,
    SetupError,
    StartLostError,
)
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import restarts, run_end, transitions
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.control.backend_requests import BackendRequests, replica_label
from flotilla_launcher.state import (
    EXIT_BAD_CONFIG,
    ExitStatus,
    ReplicaKey,
    ReplicaState,
    Run,
    Unit,
)
from flotilla_launcher.store.ledger import Ledger
from flotilla_launcher.store.operation_log import OperationState

T = TypeVar("T")

# Wait between two attempts to reach a backend: the first one, and the longest.
_RETRY_S, _RETRY_MAX_S = 0.5, 15.0
_log = log.get_logger(__name__)


class RunOwner(Protocol):
    """Owner of the run, which knows its state and records its changes."""

    run: Run
    config: LauncherConfig

    def commit_run(
        self, run: Run, notes: list[RunNote] | None = None, *, cause: str = ""
    ) -> None: ...

    def launch_spec_for(self, key: ReplicaKey) -> LaunchSpec: ...

    def record_exit(self, key: ReplicaKey, how: ExitStatus) -> None: ...


class ReplicaController:
    """Controller of the replicas of one run."""

    def __init__(self, book: RunOwner, backend: Backend, store: Ledger) -> None:
        self._book = book
        self._backend = backend
        self._intents = BackendRequests(store, book.run.run_id)
        # Starts that a drain or a kill may still prevent.
        self._starting: dict[ReplicaKey, asyncio.Task[Any]] = {}
        # Units that are being killed or were killed just now, and the kills of each.
        self._killing: set[Unit] = set()
        self._kills: dict[Unit, int] = {}

    async def run_replica(self, key: ReplicaKey) -> None:
        """Start a replica and follow it to its end."""
        launch = self._book.launch_spec_for(key)
        start = await self._run_cancellable(key, self._obtain_unit(key, launch))
        await self._follow_start(key, launch, start)

    async def _run_cancellable(
        self, key: ReplicaKey, work: Coroutine[Any, Any, T]
    ) -> asyncio.Task[T]:
        """Await the work and return its finished task; a drain or a kill cancels it."""
        task = asyncio.create_task(work, name=f"start {replica_label(key)}")
        self._starting[key] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            del self._starting[key]
        return task

    async def take_over_replica(self, key: ReplicaKey) -> None:
        """Continue a replica from the point where another launcher died."""
        launch, unit = self._book.launch_spec_for(key), self._book.run.replicas[key].unit
        if unit is None:
            # The backend may still be starting it, so the search may take long.
            looking = self.retry_until_answered(lambda: self._backend.find_replica(launch))
            look = await self._run_cancellable(key, looking)
            if look.cancelled():
                return await self._conclude_prevented(key, launch)
            unit = look.result()
        replica = self._book.run.replicas[key]
        wanted = replica.state is ReplicaState.STARTING and not self._book.run.is_ending
        if unit is None and wanted:
            return await self.run_replica(key)
        if unit is None:
            return await self._conclude_prevented(key, launch)
        if not await self.retry_until_answered(lambda: self._backend.attach_replica(launch, unit)):
            await self.retry_until_answered(lambda: self._backend.end_orphan(unit, 0.0))
            return await self._conclude_lost(key, "it ended while no launcher was there")
        if replica.unit is None:
            await self._note_started(key, unit, "found again")
        if replica.unit is None and replica.state is ReplicaState.DRAINING:
            await self.kill_replica(key)
        await self._follow_unit(key, launch, unit)

    async def drain_replica(self, key: ReplicaKey) -> None:
        """Request that a replica end; cancel a start that is under way."""
        replica = self._book.run.replicas[key]
        if key in self._starting:
            # A registered replica runs, though its backend has not answered: heartbeats drain it.
            if not replica.address:
                self._starting[key].cancel()
            return
        unit = replica.unit
        if unit is not None:
            await self.retry_until_answered(lambda: self._backend.drain_replica(unit))

    async def kill_replica(self, key: ReplicaKey) -> None:
        """Kill a replica now, once. If that fails, reconciliation repeats it."""
        if key in self._starting:
            self._starting[key].cancel()
            return
        unit = self._book.run.replicas[key].unit
        if unit is None or unit in self._killing:
            return
        self._killing.add(unit)
        try:
            await self._request_kill(key, unit)
            # Back off: ever more requests to an unreachable cloud would block all other work.
            number = self._kills[unit] = self._kills.get(unit, 0) + 1
            await asyncio.sleep(min(_RETRY_MAX_S, _RETRY_S * 2**number))
        finally:
            self._killing.discard(unit)

    async def _request_kill(self, key: ReplicaKey, unit: Unit) -> None:
        try:
            await self._backend.kill_replica(unit)
        except BackendUnreachable as error:
            # For a unit that has ended meanwhile, the failure does not matter.
            if self._book.run.replicas[key].unit == unit:
                self.note_reachability(str(error))

    async def update_price(self, key: ReplicaKey) -> None:
        """Fetch and record the price of a replica's present machines."""
        launch = self._book.launch_spec_for(key)
        price = await self.retry_until_answered(lambda: self._backend.price_per_hour(launch))
        run, notes = transitions.set_replica_price(self._book.run, key, price)
        self._book.commit_run(run, notes, cause="it has other machines")

    async def clean_run(self) -> None:
        """Free the run's remaining resources, and record the evidence."""
        run_id = self._book.run.run_id
        number = await self._intents.begin_clean()
        try:
            evidence = await self._backend.clean_run(run_id)
        except BackendUnreachable as error:
            gone, detail = False, f"the backend is unreachable: {error}"
            self.note_reachability(str(error))
        else:
            gone, detail = evidence.gone, evidence.detail
            self.note_reachability("")
        await self._intents.conclude_clean(number, gone, detail)
        run, notes = run_end.record_cleanup(self._book.run, gone, detail, clock.now())
        self._book.commit_run(run, notes, cause=detail)

    async def retry_until_answered(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request to the backend until it answers."""
        patience = _RETRY_S
        while True:
            try:
                answer = await request()
            except BackendUnreachable as error:
                self.note_reachability(str(error))
                await asyncio.sleep(patience)
                patience = min(2 * patience, _RETRY_MAX_S)
            else:
                self.note_reachability("")
                return answer

    def note_reachability(self, why: str) -> None:
        run = self._book.run
        if run.unreachable != why:
            text = f"the backend is unreachable: {why}" if why else "the backend answers again"
            notes = [RunNote(text)] if bool(why) != bool(run.unreachable) else []
            self._book.commit_run(replace(run, unreachable=why), notes)

    async def _follow_start(
        self, key: ReplicaKey, launch: LaunchSpec, start: asyncio.Task[Unit]
    ) -> None:
        """Handle the result of a start, then follow the replica to its end."""
        try:
            unit = start.result()
        except asyncio.CancelledError:
            await self._conclude_prevented(key, launch)
        except (BackendError, OSError) as error:
            await self._undo_start(launch)
            await self._mark_failed(key, str(error))
            self._conclude_failed(key, error)
        else:
            await self._note_started(key, unit, "started")
            await self._follow_unit(key, launch, unit)

    def _conclude_failed(self, key: ReplicaKey, error: BackendError | OSError) -> None:
        match error:
            case CapacityError():
                run, notes = restarts.handle_no_capacity(
                    self._book.run, key, str(error), clock.now(), self._book.config
                )
                self._book.commit_run(run, notes, cause=str(error))
            case SetupError():
                self._book.record_exit(key, ExitStatus(1, str(error), unready=True))
            # A local fault, such as an unreadable file, counts as a remote one does.
            case StartLostError() | OSError():
                self._book.record_exit(key, ExitStatus(1, str(error), began=False))
            case BackendError():
                # A retry would not help: the backend cannot provide what the spec requires.
                self._book.record_exit(key, ExitStatus(EXIT_BAD_CONFIG, str(error), began=False))

    async def _conclude_prevented(self, key: ReplicaKey, launch: LaunchSpec) -> None:
        await self._undo_start(launch)
        await self._mark_failed(key, "not wanted any more")
        self._book.record_exit(key, ExitStatus(0))

    async def _undo_start(self, launch: LaunchSpec) -> None:
        """End the remains of a start, which would block the next one."""
        try:
            await self.retry_until_answered(lambda: self._backend.undo_start(launch))
        except BackendError as error:
            # Cleanup of the run retries this.
            _log.warning("cannot undo a start", replica=replica_label(launch.key), error=str(error))

    async def _obtain_unit(self, key: ReplicaKey, launch: LaunchSpec) -> Unit:
        """Request the replica until the backend answers. An unanswered request may have been
        received, so its replica is searched for before the request is repeated."""
        heard = self._intents.may_have_been_heard(key)

        async def find_or_start() -> Unit:
            nonlocal heard
            unit = await self._backend.find_replica(launch) if heard else None
            if unit is not None and await self._backend.attach_replica(launch, unit):
                return unit
            await self._intents.mark_start(key, OperationState.SENT)
            heard = True
            return await self._request_start(launch)

        return await self.retry_until_answered(find_or_start)

    async def _request_start(self, launch: LaunchSpec) -> Unit:
        # A backend without provisioning answers at once.
        config = self._book.config
        limit = config.sky.provision.timeout_s if config.backend == "sky" else None
        try:
            async with asyncio.timeout(limit):
                return await self._backend.start_replica(launch)
        except TimeoutError as error:
            raise CapacityError(f"no machine after {limit or 0:g} s") from error

    async def _follow_unit(self, key: ReplicaKey, launch: LaunchSpec, unit: Unit) -> None:
        while True:
            try:
                how = await self._backend.wait_for_exit(unit)
            except BackendUnreachable as error:
                self.note_reachability(str(error))
                # A wait answers only at the end; attaching answers as soon as the backend does.
                await self.retry_until_answered(lambda: self._backend.attach_replica(launch, unit))
            else:
                # The backend is reachable, though other requests may have failed.
                self.note_reachability("")
                return self._book.record_exit(key, how)

    async def _note_started(self, key: ReplicaKey, unit: Unit, cause: str) -> None:
        run = transitions.mark_started(self._book.run, key, unit, clock.now(), self._book.config)
        self._book.commit_run(run, cause=cause)
        await self._intents.mark_start(key, OperationState.DONE, unit.name)

    async def _mark_failed(self, key: ReplicaKey, why: str) -> None:
        await self._intents.mark_start(key, OperationState.FAILED, why)

    async def _conclude_lost(self, key: ReplicaKey, why: str) -> None:
        await self._mark_failed(key, why)
        _log.info("a replica is gone", replica=replica_label(key), why=why)
        self._book.record_exit(key, ExitStatus(None, why))
