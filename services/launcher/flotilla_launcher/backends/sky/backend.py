"""Backend of machines that SkyPilot finds: on clouds, Slurm, Kubernetes and SSH pools.

Everything is found again by name, because SkyPilot's request ids do not outlive its server."""

import asyncio
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from flotilla_launcher.agent_protocol import UnitPhase, UnitReport
from flotilla_launcher.backends.ports import (
    Backend,
    BackendError,
    BackendUnreachable,
    CleanupEvidence,
    LaunchSpec,
    OrphanResource,
    ResourceOffer,
)
from flotilla_launcher.backends.sky import names, orphan_names
from flotilla_launcher.backends.sky.cloud_audit import CloudAuditor, LambdaCloud
from flotilla_launcher.backends.sky.cluster import ClusterManager
from flotilla_launcher.backends.sky.code_bundle import CODE_FOLDER, CodeError, pin_code
from flotilla_launcher.backends.sky.cost_estimate import OfferMaker
from flotilla_launcher.backends.sky.machine_candidates import (
    machines_for_attempt,
    machines_of,
    with_place_last,
)
from flotilla_launcher.backends.sky.machines_gone import SkyCleaner
from flotilla_launcher.backends.sky.ports import SkyPilotApi
from flotilla_launcher.backends.sky.prepared_launch import PreparedLaunch
from flotilla_launcher.backends.sky.price_catalog import open_catalog
from flotilla_launcher.backends.sky.sdk_prices import choose_price_source
from flotilla_launcher.backends.sky.signs_of_life import SignsOfLife
from flotilla_launcher.config.sky import Machines
from flotilla_launcher.security import service_variables
from flotilla_launcher.security.sealed_secrets import forget_key, load_or_make_key, seal_secrets
from flotilla_launcher.state import ExitStatus, Unit

_POLL_S = 10.0
# Watchers report every 5 seconds.
_SILENT_S = 20.0


class SkyBackend(Backend):
    """Backend that starts replicas on machines. Those of the folder `runs` belong to this launcher;
    `root` is the working tree whose commit the machines get."""

    def __init__(
        self,
        runs: Path,
        root: Path,
        client: SkyPilotApi,
        *,
        poll_s: float = _POLL_S,
        silent_s: float = _SILENT_S,
    ) -> None:
        self._runs = runs.resolve()
        self._root = root
        self._client = client
        self._poll_s = poll_s
        self._owner = names.owner_of(self._runs)
        self._offers = OfferMaker(self._owner, choose_price_source())
        self._signs = SignsOfLife(silent_s)
        self._clusters = ClusterManager(client, self._signs, poll_s)
        self._sweeper = SkyCleaner(client, poll_s, self._owner)
        self._auditor = CloudAuditor(self._runs, client, [LambdaCloud()])
        self._pinning = asyncio.Lock()

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        return await asyncio.to_thread(
            self._offers.make_offer, launch, self._code_folder(launch.run_id)
        )

    async def start_replica(self, launch: LaunchSpec) -> Unit:
        start = await self._prepare_launch(launch)
        unit = Unit(start.name, started=time.time())
        try:
            await self._clusters.start_replica(start)
        except asyncio.CancelledError:
            # An unreachable server has lost the request, or its replica is found by name.
            with suppress(BackendUnreachable):
                await self._client.cancel_pending(lambda replica: replica == start.name)
            raise
        return unit

    async def attach_replica(self, launch: LaunchSpec, unit: Unit) -> bool:
        return await self._clusters.attach_replica(unit.name)

    async def find_replica(self, launch: LaunchSpec) -> Unit | None:
        name = names.member_name(self._owner, launch.run_id, launch.key)
        while True:
            coming = await self._client.is_start_pending(name)
            if await self._clusters.is_live(name):
                return Unit(name, started=time.time())
            if not coming:
                return None
            await asyncio.sleep(self._poll_s)

    async def undo_start(self, launch: LaunchSpec) -> None:
        name = names.member_name(self._owner, launch.run_id, launch.key)
        while True:
            coming = await self._client.is_start_pending(name)
            await self._clusters.kill_replica(name)
            if not coming:
                return
            await asyncio.sleep(self._poll_s)

    async def price_per_hour(self, launch: LaunchSpec) -> float | None:
        name = names.member_name(self._owner, launch.run_id, launch.key)
        place = await self._clusters.find_place(name)
        return place and await asyncio.to_thread(self._offers.price_at_place, launch, place)

    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        return await self._clusters.wait_for_exit(unit.name)

    def note_report(self, unit: Unit, node: int, report: UnitReport) -> None:
        if report.is_of_loss:
            self._clusters.note_loss(unit.name)
        if node == 0 and report.phase is UnitPhase.EXITED:
            self._signs.doubt_replica(unit.name)
        else:
            self._signs.note_report(unit.name, node)

    async def drain_replica(self, unit: Unit) -> None:
        await self._clusters.drain_replica(unit.name)

    async def kill_replica(self, unit: Unit) -> None:
        await self._clusters.kill_replica(unit.name)

    async def list_units(self, known: Collection[Unit] = ()) -> list[Unit]:
        return [Unit(name) for name in await self._sweeper.list_members()]

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        def is_ours(name: str) -> bool:
            return orphan_names.is_of_run(name, self._owner, run_id)

        evidence = await self._sweeper.clean_run(is_ours)
        ended = await self._auditor.end_orphans(is_ours, run_id) if evidence.gone else []
        if ended:
            # Another look must confirm that they are gone.
            return CleanupEvidence(False, "; ".join(ended))
        if evidence.gone:
            forget_key(self._code_folder(run_id))
        return evidence

    async def list_orphan_resources(self, active: Collection[str]) -> list[OrphanResource]:
        folders = await asyncio.to_thread(lambda: [path.name for path in self._runs.iterdir()])
        known = await self._sweeper.list_orphans(self._orphan_filter(active), folders)
        return known + await self._auditor.list_orphans(self._orphan_filter(active))

    async def reap_orphans(self, active: Collection[str]) -> list[str]:
        ended = await self._sweeper.end_orphans(self._orphan_filter(active))
        return ended + await self._auditor.end_orphans(self._orphan_filter(active))

    def _orphan_filter(self, active: Collection[str]) -> Callable[[str], bool]:
        """Return a predicate for names of no active run.

        Apply it after each look: runs may begin meanwhile."""
        return lambda name: orphan_names.is_orphan_name(name, self._owner, active)

    def _code_folder(self, run_id: str) -> Path:
        return self._runs / run_id / CODE_FOLDER

    async def _prepare_launch(self, launch: LaunchSpec) -> PreparedLaunch:
        """Check everything that can be wrong before a machine is requested. Raises
        BackendError."""
        self._offers.check_candidates(launch)
        run_dir, service = self._runs / launch.run_id, launch.key[0]
        async with self._pinning:
            try:
                code = await asyncio.to_thread(pin_code, run_dir, self._root, launch.spec)
            except CodeError as error:
                raise BackendError(str(error)) from error
        site = self._offers.make_site(launch, code)
        wanted = service_variables.required_secrets(launch.spec, service)
        if_set = service_variables.optional_secrets(launch.spec, service)
        values = _collect_secrets(wanted, launch, if_set)
        secrets = seal_secrets(values, load_or_make_key(code))
        machines = await asyncio.to_thread(self._choose_machines, launch)
        return PreparedLaunch(launch, site, machines, secrets)

    def _choose_machines(self, launch: LaunchSpec) -> Machines:
        """Return the candidates of this attempt, in order."""
        machines = machines_of(launch.spec.config.sky, launch.key[0])
        name = names.member_name(self._owner, launch.run_id, launch.key)
        lost = self._clusters.lost_place(name)
        if lost is None or launch.attempt > 1:
            return machines_for_attempt(machines, launch.attempt)
        price_of, regions_of = self._offers.price_of, open_catalog().list_regions
        return with_place_last(machines, lost, regions_of, price_of)


def _collect_secrets(
    wanted: Collection[str], launch: LaunchSpec, if_set: Collection[str]
) -> dict[str, str]:
    """Collect the secrets by name: the run's own, and those in the launcher's environment. Those
    in `if_set` may be missing."""
    found = {name: launch.secrets.get(name) or os.environ.get(name, "") for name in wanted}
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise BackendError(
            f"{launch.key[0]} needs {', '.join(missing)} on its machine; export them where the"
            " launcher is started"
        )
    return {name: os.environ[name] for name in if_set if os.environ.get(name)} | found
