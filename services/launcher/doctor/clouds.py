"""Whether SkyPilot is there, answers, and may use the clouds that the spec names."""

import sys

from services.launcher.backends.sky.resources import machines_of
from services.launcher.doctor.findings import Finding, NotApplicableError
from services.launcher.doctor.probe_process import ask
from services.launcher.doctor.run_context import SERVICES, Subject
from services.launcher.security.env_filter import CLOUDS


async def clouds(subject: Subject) -> list[Finding]:
    if subject.backend != "sky":
        raise NotApplicableError("the run stays on this machine")
    sky = subject.plan.config.sky
    wanted = {
        service: [candidate.infra for candidate in machines_of(sky, service).candidates]
        for service in SERVICES
    }
    # SkyPilot lies in the launcher's own environment.
    also = ("SKYPILOT_*", *CLOUDS)
    return await ask(sys.executable, "sky_probe", {"wanted": wanted}, subject.environ, also)
