"""The doctor before a start: what fails refuses the run, before it costs anything."""

import os
from collections.abc import Sequence
from dataclasses import replace

from services.common.errors import ConfigError
from services.launcher.doctor.findings import Status
from services.launcher.doctor.probe_list import PROBES
from services.launcher.doctor.run_context import subject_of
from services.launcher.doctor.run_probes import examine
from services.launcher.plan import BadSpecError, read_spec
from services.launcher.ports import Intent, RefusedError


async def doctor_gate(intent: Intent) -> Sequence[str]:
    """Implements `ports.Gate`: all probes before machines are rented, the quick ones here."""
    try:
        subject = subject_of(read_spec(intent.spec_json), intent.run_dir.parent, os.environ)
    except (BadSpecError, ConfigError) as error:
        raise RefusedError(str(error)) from error
    subject = replace(subject, mode=intent.run.mode)
    everything = intent.config.backend != "local"
    probes = [probe for probe in PROBES if everything or probe.local]
    results = await examine(subject, probes=probes)
    warned = [told for result in results for told in result.told(Status.WARN)]
    failed = [told for result in results for told in result.told(Status.FAIL)]
    if failed:
        lines = "\n".join(failed)
        raise RefusedError(
            f"the doctor found what would fail:\n{lines}\nTo start in spite of one, leave it out:"
            " launcher.skip_probes"
        )
    return [f"the doctor warns: {line}" for line in warned]
