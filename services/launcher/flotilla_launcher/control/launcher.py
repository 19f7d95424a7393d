"""Operations of a launcher on its runs: plan, start, resume, scale, stop, and take over the
runs of a dead launcher."""

import asyncio
import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from grpc import StatusCode

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry import log
from flotilla_launcher import clock
from flotilla_launcher.backends.ports import (
    Backend,
    BackendError,
    BackendFactories,
    LaunchSpec,
    QueuePlace,
    ResourceOffer,
)
from flotilla_launcher.control import reaper, transitions
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.control.admission import (
    Admission,
    AdmittedRun,
    StartOrder,
    check_scale,
    refusal_error,
)
from flotilla_launcher.control.background_loops import run_safely
from flotilla_launcher.control.device_claims import make_claim
from flotilla_launcher.control.reaper import ReapReport
from flotilla_launcher.control.run_end import LAUNCHER_STOPPED
from flotilla_launcher.control.single_flight import SharedWork, WorkCancelledError
from flotilla_launcher.control.supervisor import Supervisor, SupervisorDependencies
from flotilla_launcher.ports import NO_HOOKS, LauncherHooks, RegistryHost
from flotilla_launcher.run_spec import RunSpec, parse_spec
from flotilla_launcher.state import Cleanup, RunState
from flotilla_launcher.store.ledger import Ledger, StoredRun
from flotilla_launcher.store.run_files import write_spec

_CLOSING = "this launcher is shutting down"
# Stored in place of the digest of a request that must not begin a run.
_CANCELLED_DIGEST = "cancelled"
REAP_EVERY_S = 300.0
_LOOK_S = 0.5
_NEXT_LAUNCHER = (
    "its services were ordered to end, and its machines end once their watchers lose the launcher;"
    " run `flotilla reap` when the backend answers again"
)
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LauncherDependencies:
    """Dependencies of a launcher."""

    backends: BackendFactories
    registries: RegistryHost
    hooks: LauncherHooks = NO_HOOKS


class Launcher:
    """Launcher of all runs of one runs folder."""

    def __init__(self, folder: Path, store: Ledger, equipment: LauncherDependencies) -> None:
        self.folder = folder
        self.store = store
        self.idle_since = time.monotonic()
        self._equipment = equipment
        self._admission = Admission(folder, store, self.get_backend)
        self._backends: dict[str, Backend] = {}
        self._starting = asyncio.Lock()
        # Keys: (request_id, digest).
        self._beginning: SharedWork[tuple[str, str], None] = SharedWork()
        self._active: dict[str, Supervisor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def get_backend(self, name: str) -> Backend:
        """Return a backend by name. Raises BackendError if it is not available here."""
        if name not in self._backends:
            self._backends[name] = self._equipment.backends[name]()
        return self._backends[name]

    async def recover_runs(self) -> list[str]:
        """Take over the runs of a dead launcher, and end local orphans; return the names of
        the ended ones. Raises BackendError."""
        left = self.store.list_unended()
        for stored in left:
            self.get_backend(stored.run.backend)
        # Runs that have begun keep their devices; the others keep their order.
        for stored in sorted(left, key=_recovery_order):
            await self._take_over_run(stored)
        taken = [stored for stored in left if stored.run.run_id in self._active]
        return await reaper.end_orphans(self.get_backend("local"), left, taken)

    async def _take_over_run(self, stored: StoredRun) -> None:
        run_id = stored.run.run_id
        try:
            spec = parse_spec(stored.spec_json)
        except ConfigError as error:
            why = f"this launcher cannot read its spec: {error}"
            reaper.abandon_run(self.store, reaper.mark_suspected(stored.run), why)
            return
        now = time.time()
        self.store.add_event(run_id, now, "message", {"text": "another launcher took over"})
        with suppress(BackendError):
            # The supervisor meets the same error, and ends the run.
            claim = make_claim(stored.run, spec.config, stored.begun)
            await self.get_backend(spec.config.backend).claim_devices(claim)
        await self._begin_supervision(stored, spec)
        _log.info("took over", run_id=run_id, state=stored.run.state.value)

    async def watch_for_orphans(self) -> None:
        """End orphans on all backends in use: at once, then periodically, until cancelled."""
        while True:
            await run_safely(self._reap_in_use, "searching for leaks")
            await asyncio.sleep(REAP_EVERY_S)

    def _backends_in_use(self) -> list[str]:
        used = {"local"} | self.store.list_backends()
        return [name for name in self._equipment.backends if name in used]

    async def _reap_in_use(self) -> None:
        await self._reap_backends(self._backends_in_use(), dry_run=False)

    async def reap_orphans(self, *, dry_run: bool = False) -> tuple[ReapReport, list[str]]:
        """End orphans, and search again for the suspected remains of ended runs; with
        `dry_run` only report what would be ended. Return also the runs still suspected.

        The caller may have lost the ledger, so every available backend is searched."""
        return await self._reap_backends(list(self._equipment.backends), dry_run=dry_run)

    async def _reap_backends(
        self, names: list[str], *, dry_run: bool
    ) -> tuple[ReapReport, list[str]]:
        found, used = ReapReport(), self._backends_in_use()
        seek = reaper.look_for_orphans if dry_run else reaper.reap_backend
        for name in names:
            try:
                backend = self.get_backend(name)
            except BackendError as error:
                # An unavailable backend that never had a run here holds no orphans.
                found += ReapReport(unreachable=[f"{name}: {error}"] if name in used else [])
                continue
            found += await seek(name, backend, self.store, self._active)
        for run_id in found.cleared:
            await self._equipment.registries.close(run_id, forget=True)
        return found, [s.run.run_id for name in names for s in self.store.list_suspects(name)]

    async def plan_run(
        self, spec_json: str
    ) -> tuple[RunSpec, list[tuple[LaunchSpec, int, ResourceOffer]]]:
        """Return a checked spec and, for each service, one launch, the number of replicas and the
        resources."""
        spec = await self._admission.parse_checked(spec_json)
        return spec, await self._admission.collect_offers(spec, spec.name)

    async def start_run(self, request_id: str, order: StartOrder) -> str:
        """Start or resume a run and return its id; a repeated request returns the same id."""
        if not request_id:
            message = "request_id is empty: choose one, and send the same one on a retry"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)
        digest = order.digest
        with suppress(WorkCancelledError):
            await self._beginning.join_or_begin(
                (request_id, digest),
                lambda: self._admit_and_begin(request_id, order),
            )
        known = self.store.get_request(request_id)
        if known is None:
            self._refuse_if_closing()
        known_digest, run_id = known or (_CANCELLED_DIGEST, "")
        if known_digest == _CANCELLED_DIGEST:
            message = f"request_id {request_id!r} was cancelled before it began a run"
            raise refusal_error(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
        if known_digest != digest:
            message = f"request_id {request_id!r} was used for another request, of run {run_id}"
            raise refusal_error(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
        return run_id

    async def _admit_and_begin(self, request_id: str, order: StartOrder) -> None:
        """Begin the run of a request, unless the ledger has an answer to it."""
        async with self._starting:
            if self.store.get_request(request_id) is not None:
                return
            self._refuse_if_closing()
            admitted = await self._admission.admit_run(order)
            run_id, config = admitted.run.run_id, admitted.spec.config
            try:
                at = await self._admission.claim_devices(admitted.run, config, waits=order.wait)
                if at is not None and not order.wait:
                    message = (
                        f"{at.reason}. With --wait, a run waits in the queue until it can begin"
                    )
                    raise refusal_error(StatusCode.RESOURCE_EXHAUSTED, "NO_DEVICES", message)
                admitted = await self._pin_model(admitted)
                self._refuse_if_closing()
                stored = self._record_begin(request_id, order.digest, admitted, at)
                # A caller that disconnects must not leave a run without a supervisor, and the next
                # start must wait until this run has one.
                beginning = asyncio.create_task(self._begin_run(stored, admitted.spec))
                try:
                    await asyncio.shield(beginning)
                finally:
                    await asyncio.wait({beginning})
            finally:
                if run_id not in self._active:
                    await self.get_backend(config.backend).release_devices(run_id)

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise refusal_error(StatusCode.UNAVAILABLE, "CLOSING", _CLOSING)

    async def _pin_model(self, admitted: AdmittedRun) -> AdmittedRun:
        """Return the run with the spec that is written: its model is pinned to a commit, and this
        Flotilla named."""
        pin, spec, notes = self._equipment.hooks.pin, admitted.spec, admitted.notes
        try:
            commit = await pin(spec) if pin is not None else None
        except ConfigError as error:
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        if commit:
            policy = spec.shared.policy
            text = (
                f"{policy.model}: revision {policy.revision or 'main'} is commit {commit}, pinned"
                " for this run and its resumes"
            )
            spec, notes = spec.with_revision(commit), (*notes, RunNote(text))
        return replace(admitted, spec=spec.with_writer(), notes=notes)

    def _record_begin(
        self, request_id: str, digest: str, admitted: AdmittedRun, at: QueuePlace | None
    ) -> StoredRun:
        """Write a run that begins, or that waits at this place in the queue, as the answer to its
        request."""
        run, text, notes = admitted.run, admitted.spec.text, [*admitted.notes]
        run_dir, now = self.folder / run.run_id, run.metered
        if at is not None:
            run, queued = transitions.mark_queued(run, at)
            notes = [*queued, *notes]
        try:
            if at is None:
                write_spec(run_dir, text)
            with self.store.transaction():
                self.store.begin_run(run, text, now, admitted.prices)
                self.store.add_event(run.run_id, now, "state", {"state": run.state})
                for note in notes:
                    self.store.add_event(run.run_id, now, "message", {"text": note.text})
                self.store.save_request(request_id, digest, run.run_id)
                return self.get_run(run.run_id)
        except (OSError, sqlite3.OperationalError) as error:
            message = self.store.write_problem or f"{run_dir} cannot be written: {error}"
            raise refusal_error(StatusCode.UNAVAILABLE, "NOT_BEGUN", message) from error

    async def _begin_run(self, stored: StoredRun, spec: RunSpec) -> None:
        try:
            await self._begin_supervision(stored, spec)
        except ConfigError as error:
            reaper.abandon_run(self.store, stored.run, str(error))
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        except OSError as error:
            reaper.abandon_run(self.store, stored.run, f"the launcher failed: {error}")
            raise refusal_error(StatusCode.UNAVAILABLE, "NOT_BEGUN", str(error)) from error

    async def _begin_supervision(self, stored: StoredRun, spec: RunSpec) -> None:
        run_id, config = stored.run.run_id, spec.config
        registry = await self._equipment.registries.open_registry(run_id, config, stored.registry)
        self.store.save_registry(run_id, registry.address)
        dependencies = SupervisorDependencies(
            self.get_backend(config.backend),
            self.store,
            self.folder / run_id,
            registry,
            self._equipment.hooks,
        )
        supervisor = Supervisor(stored, spec, dependencies)
        self._active[run_id] = supervisor
        task = asyncio.create_task(self._supervise_to_end(supervisor), name=f"run {run_id}")
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id))

    async def _supervise_to_end(self, supervisor: Supervisor) -> None:
        run_id = supervisor.run.run_id
        try:
            await supervisor.supervise_to_end()
        # No defect may leave processes without a supervisor.
        except Exception as error:  # noqa: BLE001
            _log.exception("supervision failed", run_id=run_id)
            backend, why = (
                self.get_backend(supervisor.config.backend),
                f"the launcher failed: {error!r}",
            )
            supervisor.run = await reaper.give_up_run(self.store, backend, supervisor.run, why)
        finally:
            del self._active[run_id]
            self.idle_since = time.monotonic()
            if supervisor.run.state is RunState.QUEUED:
                await self.get_backend(supervisor.config.backend).release_devices(run_id)
            # Watchers end only when nothing more can happen.
            supervisor.changed.notify_all()
            verified = supervisor.run.cleanup is Cleanup.VERIFIED
            await self._equipment.registries.close(run_id, forget=verified)

    def get_run(self, run_id: str) -> StoredRun:
        stored = self.store.get_run(run_id)
        if stored is None:
            raise refusal_error(StatusCode.NOT_FOUND, "UNKNOWN_RUN", f"there is no run {run_id!r}")
        supervisor = self.get_supervisor(run_id)
        if supervisor is not None and supervisor.has_ended_unwritten:
            return replace(stored, run=supervisor.run)
        return stored

    def get_supervisor(self, run_id: str) -> Supervisor | None:
        """Return the supervisor of a run that has not ended."""
        return self._active.get(run_id)

    @property
    def is_idle(self) -> bool:
        """True if this launcher may exit: no run is active, none recently left a suspected leak."""
        if self._active or self._starting.locked():
            return False
        return not reaper.has_recent_suspects(self.store, self._equipment.backends)

    async def scale_service(self, run_id: str, service: str, replicas: int) -> None:
        supervisor = self.get_supervisor(run_id)
        run = self.get_run(run_id).run if supervisor is None else supervisor.run
        check_scale(run, service, replicas)
        if supervisor is None:
            return
        scaled, queued = transitions.scale_service(run, service, replicas), run.queue_place > 0
        at = await self._admission.claim_devices(scaled, supervisor.config, waits=queued)
        if at is not None and not queued:
            raise refusal_error(StatusCode.RESOURCE_EXHAUSTED, "NO_DEVICES", at.reason)
        supervisor.scale_service(service, replicas)

    async def find_or_prevent_run(self, request_id: str) -> str:
        """Return the run that this StartRun began. If there is none, prevent it for ever."""
        self._beginning.cancel_matching(lambda key: key[0] == request_id)
        async with self._starting:
            known = self.store.get_request(request_id)
            if known is None:
                self.store.save_request(request_id, _CANCELLED_DIGEST, "")
                return ""
        return known[1]

    async def stop_run(self, run_id: str, grace_s: float) -> RunState:
        """Drain and end a run; return when it has ended."""
        stored = self.get_run(run_id)
        supervisor = self.get_supervisor(run_id)
        if supervisor is None:
            return stored.run.state
        # A run that has begun once has a folder.
        if supervisor.run.state is RunState.QUEUED and not (self.folder / run_id).exists():
            await self._withdraw_run(run_id)
            return RunState.STOPPED
        supervisor.request_stop(grace_s)
        await supervisor.wait_until_ended()
        return supervisor.run.state

    async def _withdraw_run(self, run_id: str) -> None:
        """Take a run that never began out of the queue, and leave nothing of it."""
        await self._leave_unsupervised(run_id)
        await self._equipment.registries.close(run_id, forget=True)
        self.store.forget_run(run_id, _CANCELLED_DIGEST)

    async def _leave_unsupervised(self, run_id: str) -> None:
        task = self._tasks[run_id]
        task.cancel()
        await asyncio.wait({task})

    async def close(self, grace_s: float) -> None:
        """Stop all runs and accept no more. Runs in the queue, and runs that cannot end within the
        grace because a backend is unreachable, stay in the ledger for the next launcher."""
        self._closing = True
        self._beginning.cancel_matching(lambda key: True)
        async with self._starting:
            # A start in progress is active by now, and is stopped with the others.
            pass
        queued = [name for name, s in self._active.items() if s.run.state is RunState.QUEUED]
        for run_id in queued:
            # They keep their places for the next launcher.
            await self._leave_unsupervised(run_id)
        for supervisor in self._active.values():
            supervisor.request_stop(grace_s, LAUNCHER_STOPPED)
        while self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_LOOK_S)
            self._leave_unreachable()

    def _leave_unreachable(self) -> None:
        for run_id, supervisor in self._active.items():
            run = supervisor.run
            draining = run.state is RunState.DRAINING
            if draining and run.unreachable and clock.now() >= run.drain_by:
                _log.error(
                    "cannot end the run", run_id=run_id, why=run.unreachable, hint=_NEXT_LAUNCHER
                )
                self._tasks[run_id].cancel()
            elif supervisor.is_only_unwritten:
                _log.error("cannot record the end of the run", run_id=run_id, hint=_NEXT_LAUNCHER)
                self._tasks[run_id].cancel()

    def end_all_now(self) -> None:
        """End all runs now."""
        for supervisor in self._active.values():
            supervisor.end_now()


def _recovery_order(stored: StoredRun) -> tuple[bool, int, float]:
    return (stored.run.state is RunState.QUEUED, -stored.run.priority, stored.begun)
