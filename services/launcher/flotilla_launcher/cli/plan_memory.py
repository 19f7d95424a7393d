"""Memory check of `flotilla plan`: the needs of ranks and engines against their GPUs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flotilla_launcher.doctor.findings import Finding, FindingError, NotApplicableError, Status
from flotilla_launcher.doctor.memory import check_requested, measure_needs
from flotilla_launcher.doctor.memory_estimate import describe_needs
from flotilla_launcher.doctor.run_context import make_run_context, read_sections
from flotilla_launcher.run_spec import BadSpecError, RunSpec


async def describe_memory(read: RunSpec, runs: Path, gpus: tuple[int, ...]) -> Sequence[str]:
    """Return lines about memory on the requested machines, or on one machine with these GPUs.

    Raises BadSpecError for a run that does not fit."""
    # A plan works offline: files missing from the hub's cache are not fetched.
    context = make_run_context(read, runs, {**os.environ, "HF_HUB_OFFLINE": "1"})
    sections, _ = await read_sections(context)
    context = replace(context, sections=sections, gpus=gpus)
    try:
        needs = await measure_needs(context)
    except NotApplicableError as error:
        return [f"memory: not computed, {error}"]
    except FindingError as error:
        return [f"memory: not computed, {_explain(context.shared.policy.model, error.finding)}"]
    found = list(check_requested(context, needs))
    refused = [finding.detail for finding in found if finding.status is Status.FAIL]
    if refused:
        raise BadSpecError("\n".join((f"memory: {describe_needs(needs)}", *refused)))
    return [
        f"memory: {describe_needs(needs)}",
        *(f"warning: {finding.detail}" for finding in found),
    ]


def _explain(model: str, finding: Finding) -> str:
    if Path(model).is_dir():
        return finding.detail
    return f"the config.json of {model} is not on this machine; `flotilla doctor` fetches it"
