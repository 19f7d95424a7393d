"""Probe of the tasks: they are valid, and their environments and data exist at their backend."""

from collections.abc import Sequence

from flotilla_launcher.config.backend_tables import FLEET_BACKENDS
from flotilla_launcher.doctor.adapters.key_probe import check_fleet_versions
from flotilla_launcher.doctor.dataset import EnvVersion, examine_tasks
from flotilla_launcher.doctor.findings import Finding, NotApplicableError
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.doctor.tcp_ports import used_backends
from flotilla_launcher.state import GATEWAY


async def probe_dataset(context: RunContext) -> list[Finding]:
    findings, versions = await examine_tasks(context)
    return [*findings, *await _check_fleet_data(context, versions)]


async def _check_fleet_data(context: RunContext, versions: Sequence[EnvVersion]) -> list[Finding]:
    gateway = context.sections.get(GATEWAY)
    if gateway is None or not versions or not used_backends(context) & set(FLEET_BACKENDS):
        return []
    backend_of = {name: own["backend"] for name, own in gateway["environments"].items()}
    theirs = [
        version
        for version in versions
        if (backend_of.get(version.env_key) or gateway["backend"]) in FLEET_BACKENDS
    ]
    try:
        return await check_fleet_versions(context, theirs)
    except NotApplicableError:
        # The gateway starts an emulator, which the canary episodes query.
        return []
