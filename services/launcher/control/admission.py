"""Admission of runs: checks before a run is started, resumed or scaled. All refusals are
ServiceErrors."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from grpc import StatusCode

from services.common.rpc.errors import ServiceError
from services.common.spec.config import ConfigError
from services.launcher import run_plan as plans
from services.launcher.backends.ports import (
    Backend,
    BackendError,
    BackendUnreachable,
    LaunchSpec,
    QueuePlace,
    ResourceOffer,
)
from services.launcher.config.launcher import LauncherConfig
from services.launcher.control import budget, spec_check
from services.launcher.control.device_claims import make_claim
from services.launcher.control.launch_spec import NO_REGISTRY, make_launch_spec
from services.launcher.control.recover_from_folder import recover_stored_run
from services.launcher.control.spec_changes import diff_specs, kept_commit
from services.launcher.run_plan import RunPlan
from services.launcher.state import LEARNER, Run, RunMode, RunState
from services.launcher.store.ledger import Ledger, StoredRun
from services.launcher.store.run_files import JOURNAL, describe_missing

ERROR_DOMAIN = "launcher.flotilla"
MAX_REPLICAS = 256
# Stored in place of the digest of a request that must not begin a run.
CANCELLED_DIGEST = "cancelled"


def refusal_error(
    code: StatusCode, reason: str, message: str, metadata: Mapping[str, str] | None = None
) -> ServiceError:
    return ServiceError(code, reason, message, domain=ERROR_DOMAIN, metadata=metadata)


class Admission:
    """Admission checks against the ledger, the services and the backend, without side effects."""

    def __init__(self, folder: Path, store: Ledger, backend: Callable[[str], Backend]) -> None:
        self._folder = folder
        self._store = store
        self._backend = backend

    async def parse_checked(self, spec_json: str) -> RunPlan:
        """Return the plan of a spec after all services have accepted their parts of it."""
        try:
            plan = plans.parse_spec(spec_json)
            await spec_check.check_tables(plan)
            await spec_check.check_spec(plan)
        except ConfigError as error:
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return plan

    async def collect_offers(
        self, plan: RunPlan, run_dir: Path
    ) -> list[tuple[LaunchSpec, int, ResourceOffer]]:
        """Return the resources that the plan would use: for each service one launch, the
        number of replicas, and the offer."""
        run = Run(run_id=run_dir.name, name=plan.name, wanted=plan.config.replica_counts())
        offers: list[tuple[LaunchSpec, int, ResourceOffer]] = []
        for service, replicas in run.wanted.items():
            launch = make_launch_spec(
                run, (service, 0), plan.config, plan.text, run_dir, NO_REGISTRY
            )
            offers.append((launch, replicas, await self._offer_resources(launch)))
        return offers

    async def _offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        try:
            return await self._backend(launch.config.backend).offer_resources(launch)
        except BackendError as error:
            message = f"launcher.{launch.key[0]}: {error}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message) from error
        except BackendUnreachable as error:
            message = f"the backend is unreachable: {error}"
            raise refusal_error(StatusCode.UNAVAILABLE, "BACKEND_UNREACHABLE", message) from error

    async def admit_run(
        self, spec_json: str, mode: RunMode, resume: str
    ) -> tuple[RunPlan, str, dict[str, float]]:
        """Return the plan to run, the run id, and the prices."""
        stored = self._load_resumable(resume, mode, spec_json) if resume else None
        plan = await self.parse_checked(spec_json or (stored.spec_json if stored else ""))
        if stored is not None and stored.run.name != plan.name:
            message = f"name: run {resume} is of spec {stored.run.name!r}, not {plan.name!r}"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)
        if stored is not None:
            self._check_may_change(stored, plan)
            commit = kept_commit(json.loads(stored.spec_json), plan.spec)
            plan = plans.pin_revision(plan, commit) if commit else plan
        taken = self._store.list_run_ids() | {path.name for path in self._folder.iterdir()}
        run_id = resume or plans.make_run_id(plan.name, datetime.now(UTC), taken)
        offers = await self.collect_offers(plan, self._folder / run_id)
        prices = {launch.key[0]: offer.dollars_per_hour or 0.0 for launch, _, offer in offers}
        try:
            budget.check_budget(plan.config, prices, stored.run.cost.accrued if stored else 0.0)
        except budget.OverBudgetError as error:
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return plan, run_id, prices

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

    def _check_may_change(self, stored: StoredRun, plan: RunPlan) -> None:
        """Refuse changes to keys on which the journal and checkpoints of a begun run depend."""
        if not (self._folder / stored.run.run_id / JOURNAL).exists():
            return
        found = [
            c.format_change()
            for c in diff_specs(json.loads(stored.spec_json), plan.spec)
            if c.fixed_reason
        ]
        if found:
            lines = "\n".join(f"  {each}" for each in found)
            head = f"run {stored.run.run_id} cannot resume with these changes; start a new run:"
            raise refusal_error(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", f"{head}\n{lines}")

    def _load_resumable(self, run_id: str, mode: RunMode, spec_json: str) -> StoredRun:
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
        if complete and mode is RunMode.TRAIN and not spec_json:
            message = f"run {run_id} is complete; to continue it, pass a spec with more steps"
            raise refusal_error(StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE", message)
        return stored


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


def resolve_repeat(request_id: str, known: tuple[str, str], digest: str) -> str:
    """Return the run that an earlier StartRun with this id began. Refuse an id that another
    request has used."""
    known_digest, run_id = known
    if known_digest == CANCELLED_DIGEST:
        message = f"request_id {request_id!r} was cancelled before it began a run"
        raise refusal_error(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    if known_digest != digest:
        message = f"request_id {request_id!r} was used for another request, of run {run_id}"
        raise refusal_error(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    return run_id
