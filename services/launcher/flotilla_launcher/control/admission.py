"""Admission of runs: checks before a run is started, resumed or scaled. All refusals are
ServiceErrors."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grpc import StatusCode

from flotilla_common.rpc.errors import ConfigError, ServiceError
from flotilla_launcher.backends.ports import (
    Backend,
    BackendError,
    BackendUnreachable,
    LaunchSpec,
    QueuePlace,
    ResourceOffer,
)
from flotilla_launcher.config import tinker_rules
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control import budget, spec_check
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.control.device_claims import make_claim
from flotilla_launcher.control.launch_spec import NO_REGISTRY, make_launch_spec
from flotilla_launcher.control.spec_changes import continue_spec
from flotilla_launcher.run_spec import RunSpec, parse_spec
from flotilla_launcher.state import LEARNER, Cost, Run, RunMode, RunState
from flotilla_launcher.store.ledger import Ledger, StoredRun
from flotilla_launcher.store.run_files import JOURNAL, describe_missing, recover_stored_run

ERROR_DOMAIN = "launcher.flotilla"
MAX_REPLICAS = 256


def refusal_error(
    code: StatusCode, reason: str, message: str, metadata: Mapping[str, str] | None = None
) -> ServiceError:
    return ServiceError(code, reason, message, domain=ERROR_DOMAIN, metadata=metadata)


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A request for a run: its spec and mode, the run that it resumes, and whether it waits for
    devices of this machine, in order of its priority."""

    spec_json: str
    mode: RunMode = RunMode.TRAIN
    resume: str = ""
    wait: bool = False
    priority: int = 0

    @property
    def digest(self) -> str:
        fields = [self.spec_json, self.mode, self.resume, self.wait, self.priority]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AdmittedRun:
    """A run that may begin, its spec, $/h of one replica of each service, and notes for people."""

    run: Run
    spec: RunSpec
    prices: Mapping[str, float]
    notes: tuple[RunNote, ...] = ()


class Admission:
    """Admission checks against the ledger, the services and the backend, without side effects."""

    def __init__(self, folder: Path, store: Ledger, backend: Callable[[str], Backend]) -> None:
        self._folder = folder
        self._store = store
        self._backend = backend

    async def admit_run(self, order: StartOrder) -> AdmittedRun:
        """Return the run of an order, with the spec that it is to have, after all checks."""
        before = self._load_resumable(order) if order.resume else None
        spec = await self.parse_checked(order.spec_json or (before.spec_json if before else ""))
        notes: tuple[RunNote, ...] = ()
        try:
            if before is not None:
                begun = (self._folder / order.resume / JOURNAL).exists()
                spec, notes = continue_spec(before, spec, begun=begun)
        except ConfigError as error:
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        if spec.uses_tinker:
            notes = (*notes, *_make_tinker_notes())
        taken = self._store.list_run_ids() | {path.name for path in self._folder.iterdir()}
        run_id = order.resume or _make_run_id(spec.name, datetime.now(UTC), taken)
        offers = await self.collect_offers(spec, run_id)
        prices = {launch.key[0]: offer.dollars_per_hour or 0.0 for launch, _, offer in offers}
        cost = before.run.cost if before else Cost()
        try:
            budget.check_budget(spec.config, prices, cost)
        except budget.OverBudgetError as error:
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        run = Run(
            run_id=run_id,
            name=spec.name,
            wanted=spec.replica_counts(),
            late=spec.late_services if order.mode is RunMode.TRAIN else (),
            mode=order.mode,
            backend=spec.config.backend,
            cost=cost,
            metered=time.time(),
            tokens=before.run.tokens if before else {},
            priority=order.priority,
        )
        return AdmittedRun(run, spec, prices, notes)

    async def parse_checked(self, spec_json: str) -> RunSpec:
        """Return a spec after all services have accepted their parts of it."""
        try:
            spec = parse_spec(spec_json)
            await spec_check.check_tables(spec)
            await spec_check.check_spec(spec)
        except ConfigError as error:
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return spec

    async def collect_offers(
        self, spec: RunSpec, run_id: str
    ) -> list[tuple[LaunchSpec, int, ResourceOffer]]:
        """Return the resources that a run would use: for each service one launch, the number of
        replicas, and the offer."""
        run = Run(run_id=run_id, name=spec.name, wanted=spec.replica_counts())
        offers: list[tuple[LaunchSpec, int, ResourceOffer]] = []
        for service, replicas in run.wanted.items():
            launch = make_launch_spec(run, (service, 0), spec, self._folder / run_id, NO_REGISTRY)
            offers.append((launch, replicas, await self._offer_resources(launch)))
        return offers

    async def _offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        try:
            return await self._backend(launch.spec.config.backend).offer_resources(launch)
        except BackendError as error:
            message = f"launcher.{launch.key[0]}: {error}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message) from error
        except BackendUnreachable as error:
            message = f"the backend is unreachable: {error}"
            raise refusal_error(StatusCode.UNAVAILABLE, "BACKEND_UNREACHABLE", message) from error

    async def claim_devices(
        self, run: Run, config: LauncherConfig, *, waits: bool
    ) -> QueuePlace | None:
        """Claim this machine's devices for a run that begins or is scaled; return its place in the
        queue, or None if it holds them."""
        claim = make_claim(run, config, run.metered, waits=waits)
        try:
            return await self._backend(config.backend).claim_devices(claim)
        except BackendError as error:
            message = f"launcher.SERVICE.gpus: {error}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message) from error

    def _load_resumable(self, order: StartOrder) -> StoredRun:
        run_id = order.resume
        stored = self._store.get_run(run_id) or recover_stored_run(self._folder, run_id)
        if stored is None:
            raise refusal_error(StatusCode.NOT_FOUND, "UNKNOWN_RUN", f"there is no run {run_id!r}")
        if not stored.run.state.has_ended:
            message = f"run {run_id} is {stored.run.state}; stop it first"
            raise refusal_error(StatusCode.ALREADY_EXISTS, "RUN_ACTIVE", message)
        if gone := describe_missing(self._folder, run_id):
            message = f"run {run_id} cannot resume: {gone}; restore it, or start a new run"
            raise refusal_error(StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE", message)
        complete = stored.run.state is RunState.COMPLETED and stored.run.mode is RunMode.TRAIN
        if complete and order.mode is RunMode.TRAIN and not order.spec_json:
            message = f"run {run_id} is complete; to continue it, pass a spec with more steps"
            raise refusal_error(StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE", message)
        return stored


def _make_tinker_notes() -> tuple[RunNote, ...]:
    """Return what people should know of a run at a Tinker service. Refuse it without a key."""
    try:
        tinker_rules.check_key(os.environ)
    except ConfigError as error:
        raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
    return tuple(RunNote(f"{tinker_rules.ENGINE}: {limit}") for limit in tinker_rules.LIMITS)


def check_scale(run: Run, service: str, replicas: int) -> None:
    """Refuse a number of replicas that this run's service cannot have."""
    if run.is_ending:
        message = f"run {run.run_id} is {run.state} and cannot be scaled"
        raise refusal_error(StatusCode.FAILED_PRECONDITION, "RUN_ENDED", message)
    if service not in run.wanted:
        message = f"no service {service!r}; the run has {', '.join(run.wanted)}"
        raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)
    most = 1 if service == LEARNER else MAX_REPLICAS
    if not 1 <= replicas <= most:
        message = f"{service} can have 1 to {most} replicas, not {replicas}"
        raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)


def _make_run_id(name: str, now: datetime, taken: Collection[str]) -> str:
    """Make a run id from the spec name and the UTC time; append a number if it is taken."""
    first = f"{name}-{now:%Y%m%d-%H%M%S}"
    if first not in taken:
        return first
    number = 2
    while f"{first}-{number}" in taken:
        number += 1
    return f"{first}-{number}"
