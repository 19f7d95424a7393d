"""What a launcher does with runs: plan, start, resume, scale, stop, take over from a dead one."""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from grpc import StatusCode

from services.common import log
from services.common.config import ConfigError
from services.common.errors import ServiceError
from services.launcher import budget, leaks, preflight
from services.launcher import plan as plans
from services.launcher.adopt import adopted, what_is_gone
from services.launcher.config import LauncherConfig
from services.launcher.launches import NOWHERE, launch_of
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
from services.launcher.runs import (
    LEARNER,
    Cleanup,
    Cost,
    Run,
    RunMode,
    RunState,
)
from services.launcher.store import Store, StoredRun
from services.launcher.supervise import Supervisor, Surroundings

DOMAIN = "launcher.flotilla"
MAX_REPLICAS = 256
# In place of the digest of a request that must begin nothing.
_CANCELLED = "cancelled"
REAP_EVERY_S = 300.0
_log = log.get_logger(__name__)


def refuse(
    code: StatusCode, reason: str, message: str, metadata: Mapping[str, str] | None = None
) -> ServiceError:
    return ServiceError(code, reason, message, domain=DOMAIN, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Equipment:
    """With what a launcher does its work."""

    backends: Backends
    registries: Registries
    hooks: Hooks = NO_HOOKS


@dataclass(frozen=True, slots=True)
class Reaped:
    """What a look for leaks ended; the runs that are still suspected; whom it could not ask."""

    names: list[str]
    suspected: list[str]
    unreachable: list[str]


class Launcher:
    """All runs of one runs folder."""

    def __init__(self, folder: Path, store: Store, equipment: Equipment) -> None:
        self.folder = folder
        self.store = store
        self.idle_since = time.monotonic()
        self._equipment = equipment
        self._backends: dict[str, Backend] = {}
        self._starting = asyncio.Lock()
        self._active: dict[str, Supervisor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def backend(self, name: str) -> Backend:
        """Raises BackendError where it cannot be had here."""
        if name not in self._backends:
            self._backends[name] = self._equipment.backends[name]()
        return self._backends[name]

    async def recover(self) -> list[str]:
        """Take over the runs of a launcher that died, and end what runs here of no run; returns
        the names of that. Raises BackendError."""
        left = [stored for stored in self.store.newest() if not stored.run.state.ended]
        for stored in left:
            self.backend(stored.run.backend)
        for stored in left:
            await self._take_over(stored)
        taken = [stored for stored in left if stored.run.run_id in self._active]
        return await leaks.end_orphans(self.backend("local"), left, taken)

    async def _take_over(self, stored: StoredRun) -> None:
        run_id = stored.run.run_id
        try:
            config = plans.read_spec(stored.spec_json).config
        except (BadSpecError, ConfigError) as error:
            # What runs of it is of no run now, and is ended.
            leaks.abandon(self.store, stored.run, f"this launcher cannot read its spec: {error}")
            return
        now = time.time()
        self.store.add_event(run_id, now, "message", {"text": "another launcher took over"})
        await self._supervise(stored, config)
        _log.info("took over", run_id=run_id, state=stored.run.state.value)

    async def watch_for_leaks(self) -> None:
        """Now and then end what is of no run, wherever that is. Until cancelled."""
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            await self.reap()

    async def reap(self) -> None:
        """End what is of no run, and look again for what ended runs were suspected to have left."""
        for name, backend in self._backends.items():
            for run_id in await leaks.reap(name, backend, self.store, self._active):
                await self._equipment.registries.close(run_id, forget=True)

    async def plan(self, spec_json: str) -> tuple[Plan, list[tuple[Launch, int, Offer]]]:
        """Say what a spec would start: for each service one launch, how many, and on what."""
        plan = await self._checked(spec_json)
        return plan, await self._offers(plan, self.folder / plan.name)

    async def _checked(self, spec_json: str) -> Plan:
        try:
            plan = plans.read_spec(spec_json)
            await preflight.check(plan)
        except (BadSpecError, ConfigError) as error:
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return plan

    async def _offers(self, plan: Plan, run_dir: Path) -> list[tuple[Launch, int, Offer]]:
        run = Run(run_id=run_dir.name, name=plan.name, wanted=plan.config.replicas())
        offers: list[tuple[Launch, int, Offer]] = []
        for service, replicas in run.wanted.items():
            launch = launch_of(run, (service, 0), plan.config, plan.text, run_dir, NOWHERE)
            try:
                offer = await self.backend(plan.config.backend).offer(launch)
            except BackendError as error:
                message = f"launcher.{service}: {error}"
                raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message) from error
            except BackendUnreachable as error:
                message = f"the backend cannot be asked: {error}"
                raise refuse(StatusCode.UNAVAILABLE, "BACKEND_UNREACHABLE", message) from error
            offers.append((launch, replicas, offer))
        return offers

    async def start(self, request_id: str, spec_json: str, mode: RunMode, resume: str) -> str:
        """Start or resume a run and return its id; a repeat returns the same."""
        if not request_id:
            message = "request_id is empty: send one of your own, and the same again on a retry"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)
        request = json.dumps([spec_json, mode, resume])
        digest = hashlib.sha256(request.encode()).hexdigest()
        async with self._starting:
            known = self.store.request(request_id)
            if known is not None:
                return _same_request(request_id, known, digest)
            plan, run_id, prices = await self._prepare(spec_json, mode, resume)
            run_dir = self.folder / run_id
            run_dir.mkdir(exist_ok=True)
            (run_dir / plans.SPEC_FILE).write_text(plan.text)
            with self.store.transaction():
                stored = self._write_begin(plan, run_id, mode, prices)
                self.store.remember(request_id, digest, run_id)
            await self._supervise(stored, plan.config)
        return run_id

    async def _prepare(
        self, spec_json: str, mode: RunMode, resume: str
    ) -> tuple[Plan, str, dict[str, float]]:
        if self._closing:
            raise refuse(StatusCode.UNAVAILABLE, "CLOSING", "this launcher is closing down")
        stored = self._resumable(resume, mode, spec_json) if resume else None
        plan = await self._checked(spec_json or (stored.spec_json if stored else ""))
        if stored is not None and stored.run.name != plan.name:
            message = f"name: run {resume} is of spec {stored.run.name!r}, not {plan.name!r}"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)
        taken = self.store.run_ids() | {path.name for path in self.folder.iterdir()}
        run_id = resume or plans.run_id(plan.name, datetime.now(UTC), taken)
        offers = await self._offers(plan, self.folder / run_id)
        prices = {launch.key[0]: offer.dollars_per_hour or 0.0 for launch, _, offer in offers}
        try:
            budget.check(plan.config, prices, stored.run.cost.accrued if stored else 0.0)
        except budget.OverBudgetError as error:
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return plan, run_id, prices

    def _resumable(self, run_id: str, mode: RunMode, spec_json: str) -> StoredRun:
        stored = self.store.get(run_id) or adopted(self.folder, run_id) or self.get(run_id)
        if not stored.run.state.ended:
            message = f"run {run_id} is {stored.run.state}; stop it first"
            raise refuse(StatusCode.ALREADY_EXISTS, "RUN_ACTIVE", message)
        if gone := what_is_gone(self.folder, run_id):
            message = f"run {run_id} cannot go on: {gone}; restore it, or start a new run"
            raise refuse(StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE", message)
        complete = stored.run.state is RunState.COMPLETED and stored.run.mode is RunMode.TRAIN
        if complete and mode is RunMode.TRAIN and not spec_json:
            message = f"run {run_id} is complete; to go on, give it a spec with more steps"
            raise refuse(StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE", message)
        return stored

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
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        return leaks.abandon(self.store, run, error)

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
        return not self._active and not self._starting.locked()

    def scale(self, run_id: str, service: str, replicas: int) -> None:
        stored = self.get(run_id)
        supervisor = self.active(run_id)
        if supervisor is None or supervisor.run.ending:
            state = supervisor.run.state if supervisor else stored.run.state
            message = f"run {run_id} is {state}: nothing to scale"
            raise refuse(StatusCode.FAILED_PRECONDITION, "RUN_ENDED", message)
        if service not in supervisor.run.wanted:
            message = f"no service {service!r}; there are {', '.join(supervisor.run.wanted)}"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)
        most = 1 if service == LEARNER else MAX_REPLICAS
        if not 1 <= replicas <= most:
            message = f"{service} can have 1 to {most} replicas, not {replicas}"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)
        supervisor.scale(service, replicas)

    async def run_of(self, request_id: str) -> str:
        """The run that this StartRun began; where it has begun none, it never will."""
        async with self._starting:
            known = self.store.request(request_id)
            if known is None:
                self.store.remember(request_id, _CANCELLED, "")
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
        """Stop all runs and take no more."""
        self._closing = True
        for supervisor in self._active.values():
            supervisor.stop(grace_s)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def hurry(self) -> None:
        """End all runs now."""
        for supervisor in self._active.values():
            supervisor.hurry()


def _same_request(request_id: str, known: tuple[str, str], digest: str) -> str:
    known_digest, run_id = known
    if known_digest == _CANCELLED:
        message = f"request_id {request_id!r} was cancelled before it began a run"
        raise refuse(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    if known_digest != digest:
        message = f"request_id {request_id!r} was used for another request, of run {run_id}"
        raise refuse(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    return run_id
