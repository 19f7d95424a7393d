"""What a launcher does with runs: plan, start, resume, scale, stop, take over from a dead one."""

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

from grpc import StatusCode

from services.common import log
from services.common.config import ConfigError
from services.launcher import clock
from services.launcher import plan as plans
from services.launcher.config.launcher import LauncherConfig
from services.launcher.control import reaper
from services.launcher.control.admission import (
    CANCELLED,
    Admission,
    check_scale,
    refuse,
    same_request,
)
from services.launcher.control.background import unbroken
from services.launcher.control.reaper import Reaped
from services.launcher.control.shared_work import GivenUpError, Joint
from services.launcher.control.supervisor import Supervisor, Surroundings
from services.launcher.plan import BadSpecError, Plan
from services.launcher.ports import (
    NO_HOOKS,
    Backend,
    BackendError,
    Backends,
    BackendUnreachable,
    Evidence,
    Hooks,
    Launch,
    Offer,
    Registries,
)
from services.launcher.state import Cleanup, Cost, Run, RunMode, RunState
from services.launcher.store.ledger import Store, StoredRun

_CLOSING = "this launcher is closing down"
REAP_EVERY_S = 300.0
_LOOK_S = 0.5
_NEXT_LAUNCHER = (
    "its services were told to end and its machines end when their watchers hear of no launcher;"
    " `flotilla reap`, once the backend answers, goes on with it"
)
_log = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Equipment:
    """With what a launcher does its work."""

    backends: Backends
    registries: Registries
    hooks: Hooks = NO_HOOKS


class Launcher:
    """All runs of one runs folder."""

    def __init__(self, folder: Path, store: Store, equipment: Equipment) -> None:
        self.folder = folder
        self.store = store
        self.idle_since = time.monotonic()
        self._equipment = equipment
        self._admission = Admission(folder, store, self.backend)
        self._backends: dict[str, Backend] = {}
        self._starting = asyncio.Lock()
        # By request_id and digest.
        self._beginning: Joint[tuple[str, str], str] = Joint()
        self._active: dict[str, Supervisor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def backend(self, name: str) -> Backend:
        """Raises BackendError where it cannot be had here."""
        if name not in self._backends:
            self._backends[name] = self._equipment.backends[name]()
        return self._backends[name]

    async def recover(self) -> list[str]:
        """Take over the runs of a launcher that died, and end what runs here of no run; returns
        the names of that. Raises BackendError."""
        left = self.store.unended()
        for stored in left:
            self.backend(stored.run.backend)
        for stored in left:
            await self._take_over(stored)
        taken = [stored for stored in left if stored.run.run_id in self._active]
        return await reaper.end_orphans(self.backend("local"), left, taken)

    async def _take_over(self, stored: StoredRun) -> None:
        run_id = stored.run.run_id
        try:
            config = plans.read_spec(stored.spec_json).config
        except (BadSpecError, ConfigError) as error:
            why = f"this launcher cannot read its spec: {error}"
            reaper.abandon(self.store, reaper.left(stored.run), why)
            return
        now = time.time()
        self.store.add_event(run_id, now, "message", {"text": "another launcher took over"})
        await self._supervise(stored, config)
        _log.info("took over", run_id=run_id, state=stored.run.state.value)

    async def watch_for_leaks(self) -> None:
        """At first and now and then end what is of no run, wherever that is. Until cancelled."""
        while True:
            await unbroken(self._reap_used, "looking for leaks")
            await asyncio.sleep(REAP_EVERY_S)

    def _used(self) -> list[str]:
        """The backends that may hold something of runs that are known here."""
        used = {"local"} | {stored.run.backend for stored in self.store.newest()}
        return [name for name in self._equipment.backends if name in used]

    async def _reap_used(self) -> None:
        await self._reap(self._used(), dry_run=False)

    async def reap(self, *, dry_run: bool = False) -> tuple[Reaped, list[str]]:
        """End what is of no run, and look again for what ended runs were suspected to have left;
        or only say what that would end. With the runs that are still suspected.

        Whoever asks for it may have lost the ledger: every backend is asked that can be had.
        """
        return await self._reap(list(self._equipment.backends), dry_run=dry_run)

    async def _reap(self, names: list[str], *, dry_run: bool) -> tuple[Reaped, list[str]]:
        found, seek, used = Reaped(), reaper.look if dry_run else reaper.reap, self._used()
        for name in names:
            try:
                backend = self.backend(name)
            except BackendError as error:
                # What never had a run here, and cannot be had here, has nothing of ours.
                found += Reaped(unreachable=[f"{name}: {error}"] if name in used else [])
                continue
            found += await seek(name, backend, self.store, self._active)
        for run_id in found.cleared:
            await self._equipment.registries.close(run_id, forget=True)
        return found, [s.run.run_id for name in names for s in self.store.suspects(name)]

    async def plan(self, spec_json: str) -> tuple[Plan, list[tuple[Launch, int, Offer]]]:
        """Say what a spec would start: for each service one launch, how many, and on what."""
        plan = await self._admission.checked(spec_json)
        return plan, await self._admission.offers(plan, self.folder / plan.name)

    async def start(self, request_id: str, spec_json: str, mode: RunMode, resume: str) -> str:
        """Start or resume a run and return its id; a repeat returns the same."""
        if not request_id:
            message = "request_id is empty: send one of your own, and the same again on a retry"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)
        request = json.dumps([spec_json, mode, resume])
        digest = hashlib.sha256(request.encode()).hexdigest()
        try:
            return await self._beginning.join(
                (request_id, digest),
                lambda: self._start(request_id, digest, spec_json, mode, resume),
            )
        except GivenUpError as error:
            known = self.store.request(request_id)
            if known is None and self._closing:
                raise refuse(StatusCode.UNAVAILABLE, "CLOSING", _CLOSING) from error
            return same_request(request_id, known or (CANCELLED, ""), digest)

    async def _start(
        self, request_id: str, digest: str, spec_json: str, mode: RunMode, resume: str
    ) -> str:
        async with self._starting:
            known = self.store.request(request_id)
            if known is not None:
                return same_request(request_id, known, digest)
            if self._closing:
                raise refuse(StatusCode.UNAVAILABLE, "CLOSING", _CLOSING)
            plan, run_id, prices = await self._admission.admit(spec_json, mode, resume)
            if self._closing:
                raise refuse(StatusCode.UNAVAILABLE, "CLOSING", _CLOSING)
            run_dir = self.folder / run_id
            run_dir.mkdir(exist_ok=True)
            (run_dir / plans.SPEC_FILE).write_text(plan.text)
            with self.store.transaction():
                stored = self._write_begin(plan, run_id, mode, prices)
                self.store.remember(request_id, digest, run_id)
            # Who asks no longer must not leave a run that nobody watches; and until it is watched,
            # nobody else has a turn.
            beginning = asyncio.create_task(self._begin(stored, plan.config))
            try:
                await asyncio.shield(beginning)
            finally:
                await asyncio.wait({beginning})
        return run_id

    async def _begin(self, stored: StoredRun, config: LauncherConfig) -> None:
        try:
            await self._supervise(stored, config)
        except ConfigError as error:
            reaper.abandon(self.store, stored.run, str(error))
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        except OSError as error:
            reaper.abandon(self.store, stored.run, f"the launcher failed: {error}")
            raise refuse(StatusCode.UNAVAILABLE, "NOT_BEGUN", str(error)) from error

    def _write_begin(
        self, plan: Plan, run_id: str, mode: RunMode, prices: dict[str, float]
    ) -> StoredRun:
        now, known = time.time(), self.store.get(run_id)
        run = Run(
            run_id=run_id,
            name=plan.name,
            wanted=plan.config.replicas(),
            mode=mode,
            backend=plan.config.backend,
            cost=known.run.cost if known else Cost(),
            metered=now,
        )
        self.store.begin(run, plan.text, now, prices)
        self.store.add_event(run_id, now, "state", {"state": run.state})
        return self.get(run_id)

    async def _supervise(self, stored: StoredRun, config: LauncherConfig) -> None:
        run_id = stored.run.run_id
        registry = await self._equipment.registries.open(run_id, config, stored.registry)
        self.store.save_registry(run_id, registry.address)
        around = Surroundings(
            self.backend(config.backend),
            self.store,
            self.folder / run_id,
            registry,
            self._equipment.hooks,
        )
        supervisor = Supervisor(stored, config, around)
        self._active[run_id] = supervisor
        task = asyncio.create_task(self._see_through(supervisor), name=f"run {run_id}")
        self._tasks[run_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run_id))

    async def _see_through(self, supervisor: Supervisor) -> None:
        run_id = supervisor.run.run_id
        try:
            await supervisor.supervise()
        # Whatever the defect is, it must not leave processes that nobody watches.
        except Exception as error:  # noqa: BLE001
            _log.exception("supervision failed", run_id=run_id)
            supervisor.run = await self._give_up(supervisor, f"the launcher failed: {error!r}")
        finally:
            del self._active[run_id]
            self.idle_since = time.monotonic()
            # Whoever watches ends only when nothing more can happen.
            supervisor.changed.notify()
            verified = supervisor.run.cleanup is Cleanup.VERIFIED
            await self._equipment.registries.close(run_id, forget=verified)

    async def _give_up(self, supervisor: Supervisor, error: str) -> Run:
        run, backend = supervisor.run, self.backend(supervisor.config.backend)
        units = [r.unit for r in run.replicas.values() if r.unit is not None]
        try:
            await asyncio.gather(*(backend.kill(unit) for unit in units))
            evidence = await backend.clean(run.run_id)
        except BackendUnreachable as unreachable:
            evidence = Evidence(False, f"the backend cannot be asked: {unreachable}")
        cleanup = Cleanup.VERIFIED if evidence.gone else Cleanup.LEAK_SUSPECTED
        run = replace(run, cleanup=cleanup, cleanup_detail=evidence.detail)
        return reaper.abandon(self.store, run, error)

    def get(self, run_id: str) -> StoredRun:
        stored = self.store.get(run_id)
        if stored is None:
            raise refuse(StatusCode.NOT_FOUND, "UNKNOWN_RUN", f"there is no run {run_id!r}")
        return stored

    def active(self, run_id: str) -> Supervisor | None:
        """The supervisor of a run that has not ended."""
        return self._active.get(run_id)

    @property
    def idle(self) -> bool:
        """Whether nothing is lost when this launcher goes."""
        if self._active or self._starting.locked():
            return False
        return not reaper.suspected(self.store, self._equipment.backends)

    def scale(self, run_id: str, service: str, replicas: int) -> None:
        supervisor = self.active(run_id)
        run = self.get(run_id).run if supervisor is None else supervisor.run
        check_scale(run, service, replicas)
        if supervisor is not None:
            supervisor.scale(service, replicas)

    async def run_of(self, request_id: str) -> str:
        """The run that this StartRun began; where it has begun none, it never will."""
        self._beginning.give_up(lambda key: key[0] == request_id)
        async with self._starting:
            known = self.store.request(request_id)
            if known is None:
                self.store.remember(request_id, CANCELLED, "")
                return ""
        return known[1]

    async def stop(self, run_id: str, grace_s: float) -> RunState:
        """Drain and end a run; returns when it has ended."""
        stored = self.get(run_id)
        supervisor = self.active(run_id)
        if supervisor is None:
            return stored.run.state
        supervisor.stop(grace_s)
        await supervisor.ended()
        return supervisor.run.state

    async def close(self, grace_s: float) -> None:
        """Stop all runs and take no more. What the grace was too short for, because a backend
        cannot be asked, stays in the ledger for the next launcher."""
        self._closing = True
        self._beginning.give_up(lambda key: True)
        async with self._starting:
            # What was just being begun is active now, and stopped with the others.
            pass
        for supervisor in self._active.values():
            supervisor.stop(grace_s)
        while self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_LOOK_S)
            self._leave_unreachable()

    def _leave_unreachable(self) -> None:
        for run_id, supervisor in self._active.items():
            run = supervisor.run
            draining = run.state is RunState.DRAINING
            if draining and run.unreachable and clock.now() >= run.drain_by:
                _log.error("not ended", run_id=run_id, why=run.unreachable, hint=_NEXT_LAUNCHER)
                self._tasks[run_id].cancel()
            elif run.state.ended and supervisor.behind:
                _log.error("its end is not written down", run_id=run_id, hint=_NEXT_LAUNCHER)
                self._tasks[run_id].cancel()

    def hurry(self) -> None:
        """End all runs now."""
        for supervisor in self._active.values():
            supervisor.hurry()
