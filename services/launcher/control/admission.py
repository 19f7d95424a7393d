"""Whether a run may be started or resumed as it is asked for. All refusals are ServiceErrors."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from grpc import StatusCode

from services.common.config import ConfigError
from services.common.errors import ServiceError
from services.launcher import plan as plans
from services.launcher.control import budget, spec_check
from services.launcher.control.launch_spec import NOWHERE, launch_of
from services.launcher.control.recover_from_folder import JOURNAL, adopted, what_is_gone
from services.launcher.control.spec_changes import changes
from services.launcher.plan import BadSpecError, Plan
from services.launcher.ports import Backend, BackendError, BackendUnreachable, Launch, Offer
from services.launcher.state import LEARNER, Run, RunMode, RunState
from services.launcher.store.ledger import Store, StoredRun

DOMAIN = "launcher.flotilla"
MAX_REPLICAS = 256
# In place of the digest of a request that must begin nothing.
CANCELLED = "cancelled"


def refuse(
    code: StatusCode, reason: str, message: str, metadata: Mapping[str, str] | None = None
) -> ServiceError:
    return ServiceError(code, reason, message, domain=DOMAIN, metadata=metadata)


class Admission:
    """Asks the ledger, the services and the backend, and changes nothing."""

    def __init__(self, folder: Path, store: Store, backend: Callable[[str], Backend]) -> None:
        self._folder = folder
        self._store = store
        self._backend = backend

    async def checked(self, spec_json: str) -> Plan:
        """The spec, once all services have found their parts of it right."""
        try:
            plan = plans.read_spec(spec_json)
            await spec_check.check(plan)
        except (BadSpecError, ConfigError) as error:
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return plan

    async def offers(self, plan: Plan, run_dir: Path) -> list[tuple[Launch, int, Offer]]:
        """What would be used: for each service one launch, how many, and on what."""
        run = Run(run_id=run_dir.name, name=plan.name, wanted=plan.config.replicas())
        offers: list[tuple[Launch, int, Offer]] = []
        for service, replicas in run.wanted.items():
            launch = launch_of(run, (service, 0), plan.config, plan.text, run_dir, NOWHERE)
            try:
                offer = await self._backend(plan.config.backend).offer(launch)
            except BackendError as error:
                message = f"launcher.{service}: {error}"
                raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message) from error
            except BackendUnreachable as error:
                message = f"the backend cannot be asked: {error}"
                raise refuse(StatusCode.UNAVAILABLE, "BACKEND_UNREACHABLE", message) from error
            offers.append((launch, replicas, offer))
        return offers

    async def admit(
        self, spec_json: str, mode: RunMode, resume: str
    ) -> tuple[Plan, str, dict[str, float]]:
        """What to run, under which id, and its prices."""
        stored = self._resumable(resume, mode, spec_json) if resume else None
        plan = await self.checked(spec_json or (stored.spec_json if stored else ""))
        if stored is not None and stored.run.name != plan.name:
            message = f"name: run {resume} is of spec {stored.run.name!r}, not {plan.name!r}"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)
        if stored is not None:
            self._check_may_change(stored, plan)
        taken = self._store.run_ids() | {path.name for path in self._folder.iterdir()}
        run_id = resume or plans.run_id(plan.name, datetime.now(UTC), taken)
        offers = await self.offers(plan, self._folder / run_id)
        prices = {launch.key[0]: offer.dollars_per_hour or 0.0 for launch, _, offer in offers}
        try:
            budget.check(plan.config, prices, stored.run.cost.accrued if stored else 0.0)
        except budget.OverBudgetError as error:
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", str(error)) from error
        return plan, run_id, prices

    def _check_may_change(self, stored: StoredRun, plan: Plan) -> None:
        """A run that has begun keeps what its journal and checkpoints stand on."""
        if not (self._folder / stored.run.run_id / JOURNAL).exists():
            return
        found = [c.told() for c in changes(json.loads(stored.spec_json), plan.spec) if c.fixed]
        if found:
            lines = "\n".join(f"  {each}" for each in found)
            message = f"run {stored.run.run_id} cannot go on so; start a new run:\n{lines}"
            raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SPEC", message)

    def _resumable(self, run_id: str, mode: RunMode, spec_json: str) -> StoredRun:
        stored = self._store.get(run_id) or adopted(self._folder, run_id)
        if stored is None:
            raise refuse(StatusCode.NOT_FOUND, "UNKNOWN_RUN", f"there is no run {run_id!r}")
        if not stored.run.state.ended:
            message = f"run {run_id} is {stored.run.state}; stop it first"
            raise refuse(StatusCode.ALREADY_EXISTS, "RUN_ACTIVE", message)
        if gone := what_is_gone(self._folder, run_id):
            message = f"run {run_id} cannot go on: {gone}; restore it, or start a new run"
            raise refuse(StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE", message)
        complete = stored.run.state is RunState.COMPLETED and stored.run.mode is RunMode.TRAIN
        if complete and mode is RunMode.TRAIN and not spec_json:
            message = f"run {run_id} is complete; to go on, give it a spec with more steps"
            raise refuse(StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE", message)
        return stored


def check_scale(run: Run, service: str, replicas: int) -> None:
    """Refuse so many replicas of a service where a run cannot have them."""
    if run.ending:
        message = f"run {run.run_id} is {run.state}: nothing to scale"
        raise refuse(StatusCode.FAILED_PRECONDITION, "RUN_ENDED", message)
    if service not in run.wanted:
        message = f"no service {service!r}; there are {', '.join(run.wanted)}"
        raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)
    most = 1 if service == LEARNER else MAX_REPLICAS
    if not 1 <= replicas <= most:
        message = f"{service} can have 1 to {most} replicas, not {replicas}"
        raise refuse(StatusCode.INVALID_ARGUMENT, "BAD_SERVICE", message)


def same_request(request_id: str, known: tuple[str, str], digest: str) -> str:
    """The run that an earlier StartRun with this id began. Refuses one that asked for another."""
    known_digest, run_id = known
    if known_digest == CANCELLED:
        message = f"request_id {request_id!r} was cancelled before it began a run"
        raise refuse(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    if known_digest != digest:
        message = f"request_id {request_id!r} was used for another request, of run {run_id}"
        raise refuse(StatusCode.ALREADY_EXISTS, "REQUEST_CONFLICT", message)
    return run_id
