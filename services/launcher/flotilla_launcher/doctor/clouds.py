"""Probe of SkyPilot: it is installed, answers, and may use the clouds that the spec names."""

import sys

from flotilla_launcher.backends.sky.machine_candidates import machines_of
from flotilla_launcher.doctor.findings import Finding, NotApplicableError
from flotilla_launcher.doctor.probe_process import run_probe_module
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.security.service_variables import CLOUD_VARIABLES


async def probe_clouds(context: RunContext) -> list[Finding]:
    if context.backend != "sky":
        raise NotApplicableError("the run stays on this machine")
    sky = context.plan.config.sky
    wanted = {
        service: [candidate.infra for candidate in machines_of(sky, service).candidates]
        for service in context.plan.services
    }
    # SkyPilot lies in the launcher's own environment.
    also = ("SKYPILOT_*", *CLOUD_VARIABLES)
    module = "flotilla_launcher.doctor.adapters.clouds_probe"
    return await run_probe_module(sys.executable, module, {"wanted": wanted}, context.environ, also)
