"""What a launcher does with runs: plan, start, resume, scale, stop, clean up after a dead one."""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from grpc import StatusCode

from services.common import log
from services.common.config import ConfigError
from services.common.errors import ServiceError
from services.launcher import plan as plans
from services.launcher import preflight
from services.launcher.adopt import adopted, what_is_gone
from services.launcher.plan import BadSpecError, Plan
from services.launcher.ports import Backend, BackendError, Launch, Offer
from services.launcher.runs import LEARNER, ReplicaState, Run, RunMode, RunState
from services.launcher.store import Store, StoredRun
from services.launcher.supervise import Supervisor, Surroundings, replica_body

DOMAIN = "launcher.flotilla"
# How long what a dead launcher left may take to drain.
ORPHAN_GRACE_S = 20.0
MAX_REPLICAS = 256
_log = log.get_logger(__name__)


def refuse(
    code: StatusCode, reason: str, message: str, metadata: Mapping[str, str] | None = None
) -> ServiceError:
    return ServiceError(code, reason, message, domain=DOMAIN, metadata=metadata)


class Launcher:
    """All runs of one runs folder."""

    def __init__(self, folder: Path, store: Store, backend: Backend, token: str) -> None:
        self.folder = folder
        self.store = store
        self.registry = ""
        self._backend = backend
        self._token = token
        self._starting = asyncio.Lock()
        self._active: dict[str, Supervisor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.idle_since = time.monotonic()

    async def recover(self) -> list[str]:
        """End what a dead launcher left running; its runs are stopped, and resumable."""
        left = [stored for stored in self.store.newest() if not stored.run.state.ended]
        known = [r.unit for s in left for r in s.run.replicas.values() if r.unit is not None]
        orphans = await self._backend.orphans(known)
        await asyncio.gather(*(self._backend.end(unit, ORPHAN_GRACE_S) for unit in orphans))
        for stored in left:
            await self._backend.clean(stored.run.run_id)
            self._close_books(stored.run, RunState.STOPPED, "its launcher died; resume it")
        if orphans:
            _log.warning("ended orphans", names=[unit.name for unit in orphans])
        return [unit.name for unit in orphans]

    def _close_books(self, run: Run, state: RunState, error: str) -> None:
        over = [
            replace(r, state=ReplicaState.STOPPED, unit=None, address="")
            for r in run.replicas.values()
            if not r.state.over
        ]
        now = time.time()
        with self.store.transaction():
            self.store.save(replace(run, state=state, error=error), over, now)
            for replica in over:
                self.store.add_event(run.run_id, now, "replica", replica_body(replica))
            self.store.add_event(run.run_id, now, "message", {"text": error})
            self.store.add_event(run.run_id, now, "state", {"state": state})

    async def plan(self, spec_json: str) -> tuple[Plan, list[tuple[Launch, int, Offer]]]:
        """Say what a spec would start: for each service one launch, how many, and on what."""
        plan = await self._checked(spec_json)
        return plan, self._offers(plan, self.folder / plan.name)

    async def _checked(self, spec_json: str) -> Plan:
        try:
            plan = plans.read_spec(spec_json)
            await preflight.check(plan)
        except (BadSpecError, ConfigError) as error:
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return plan

    def _offers(self, plan: Plan, run_dir: Path) -> list[tuple[Launch, int, Offer]]:
        offers: list[tuple[Launch, int, Offer]] = []
        for service, replicas in plan.config.replicas().items():
            key = (service, 0)
            launch = Launch(
                run_id=run_dir.name,
                key=key,
                command=plans.replica_command(
                    plan.config.modules, key, run_dir, self.registry, RunMode.TRAIN
                ),
                secrets={},
                log=plans.log_path(run_dir, key),
                gpus=plan.config.gpus()[service],
            )
            try:
                offers.append((launch, replicas, self._backend.offer(launch)))
            except BackendError as error:
                message = f"launcher.{service}.gpus: {error}"
                raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message) from error
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
            plan, run_id = await self._prepare(spec_json, mode, resume)
            self._begin(plan, run_id, mode, request_id, digest)
        return run_id

    async def _prepare(self, spec_json: str, mode: RunMode, resume: str) -> tuple[Plan, str]:
        if self._closing:
            raise refuse(StatusCode.UNAVAILABLE, "CLOSING", "this launcher is closing down")
        stored = self._resumable(resume, mode, spec_json) if resume else None
        plan = await self._checked(spec_json or (stored.spec_json if stored else ""))
        if stored is not None and stored.run.name != plan.name:
            message = f"name: run {resume} is of spec {stored.run.name!r}, not {plan.name!r}"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)
        taken = self.store.run_ids() | {path.name for path in self.folder.iterdir()}
        run_id = resume or plans.run_id(plan.name, datetime.now(UTC), taken)
        self._offers(plan, self.folder / run_id)
        return plan, run_id

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

    def _begin(self, plan: Plan, run_id: str, mode: RunMode, request_id: str, digest: str) -> None:
        run_dir = self.folder / run_id
        run_dir.mkdir(exist_ok=True)
        (run_dir / plans.SPEC_FILE).write_text(plan.text)
        run = Run(run_id=run_id, name=plan.name, wanted=plan.config.replicas(), mode=mode)
        now = time.time()
        with self.store.transaction():
            self.store.begin(run, plan.text, now)
            self.store.remember(request_id, digest, run_id)
            self.store.add_event(run_id, now, "state", {"state": run.state})
        around = Surroundings(self._backend, self.store, run_dir, self.registry, self._token)
        supervisor = Supervisor(run, plan.config, around)
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
            units = [r.unit for r in supervisor.run.replicas.values() if r.unit is not None]
            await asyncio.gather(*(self._backend.kill(unit) for unit in units))
            self._close_books(supervisor.run, RunState.FAILED, f"the launcher failed: {error!r}")
            supervisor.run = replace(supervisor.run, state=RunState.FAILED)
        finally:
            del self._active[run_id]
            self.idle_since = time.monotonic()
            # Whoever watches ends only when nothing more can happen.
            supervisor.changed.notify()

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
        if supervisor is None or supervisor.run.state is RunState.DRAINING:
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
            supervisor.stop(0.0)


def _same_request(request_id: str, known: tuple[str, str], digest: str) -> str:
    known_digest, run_id = known
    if known_digest != digest:
        message = f"request_id {request_id!r} was used for another request, of run {run_id}"
        raise refuse(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    return run_id
