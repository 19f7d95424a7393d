"""Whether SkyPilot is there, answers, and may use the clouds that the spec names."""

import sys

from services.launcher.doctor.children import ask
from services.launcher.doctor.results import Finding, NotApplicableError
from services.launcher.doctor.subject import SERVICES, Subject
from services.launcher.inherited import CLOUDS
from services.launcher.sky.candidates import machines_of


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
    return await ask(sys.executable, "probes_sky", {"wanted": wanted}, subject.environ, also)
