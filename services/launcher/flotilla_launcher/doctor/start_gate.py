"""The doctor before a start: a failed probe refuses the run before it costs anything."""

import os
from collections.abc import Sequence
from dataclasses import replace

from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.probe_list import PROBES
from flotilla_launcher.doctor.run_context import make_run_context
from flotilla_launcher.doctor.run_probes import examine_run
from flotilla_launcher.ports import PendingRun, RunRefusedError


async def doctor_gate(intent: PendingRun) -> Sequence[str]:
    """Run the doctor as `ports.Gate`: all probes before machines are rented, the quick ones for
    this machine."""
    context = make_run_context(intent.spec, intent.run_dir.parent, os.environ)
    context = replace(context, mode=intent.run.mode)
    everything = intent.spec.config.backend != "local"
    probes = [probe for probe in PROBES if everything or probe.local]
    results = await examine_run(context, probes=probes)
    warned = [text for result in results for text in result.format_findings(Status.WARN)]
    failed = [text for result in results for text in result.format_findings(Status.FAIL)]
    if failed:
        lines = "\n".join(failed)
        raise RunRefusedError(
            f"the doctor found what would fail:\n{lines}\nTo start in spite of one, leave its"
            " probe out: launcher.skip_probes"
        )
    return [f"the doctor warns: {line}" for line in warned]
