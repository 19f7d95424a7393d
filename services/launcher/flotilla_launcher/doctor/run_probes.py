"""Concurrent execution of probes, each with a deadline of its own."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

from flotilla_launcher.doctor.findings import (
    Finding,
    FindingError,
    NotApplicableError,
    ProbeResult,
    Status,
    combine_findings,
    fail,
    hide_secrets,
)
from flotilla_launcher.doctor.probe_list import PROBES, Probe
from flotilla_launcher.doctor.run_context import RunContext, read_sections
from flotilla_launcher.security.service_variables import TINKER_PLACES, variables_of_any_service

SPEC = "spec"
_SPEC_LIMIT_S = 60.0
_SKIPPED = "left out by --skip or launcher.skip_probes"


async def examine_run(
    context: RunContext, skip: Collection[str] = (), probes: Sequence[Probe] = PROBES
) -> list[ProbeResult]:
    """Return one result for each probe, in their order, after that of the spec itself."""
    try:
        async with asyncio.timeout(_SPEC_LIMIT_S):
            sections, findings = await read_sections(context)
    except TimeoutError:
        sections, findings = {}, [_make_timeout_finding(_SPEC_LIMIT_S)]
    if wrong := find_unknown_probes(context.plan.config.skip_probes):
        what = f"launcher.skip_probes: there is no probe {wrong[0]!r}"
        findings = [*findings, fail(what, f"there are {', '.join(p.name for p in PROBES)}")]
    # The check of the spec itself cannot be left out.
    about_spec = _redact_result(combine_findings(SPEC, findings), context)
    return [about_spec, *await run_probes(replace(context, sections=sections), probes, skip)]


async def run_probes(
    context: RunContext, probes: Sequence[Probe], skip: Collection[str] = ()
) -> list[ProbeResult]:
    """Return one result for each of these probes, for a context whose sections are known."""
    left_out = {*skip, *context.plan.config.skip_probes}
    return list(await asyncio.gather(*(_run_probe(probe, context, left_out) for probe in probes)))


async def _run_probe(probe: Probe, context: RunContext, left_out: Collection[str]) -> ProbeResult:
    if probe.name in left_out:
        return combine_findings(probe.name, [Finding(Status.SKIPPED, _SKIPPED)])
    try:
        async with asyncio.timeout(probe.limit_s):
            findings = await probe.run(context)
    except TimeoutError:
        findings = [_make_timeout_finding(probe.limit_s)]
    except NotApplicableError as error:
        findings = [Finding(Status.SKIPPED, str(error))]
    except FindingError as error:
        findings = [error.finding]
    # A defect of a probe is a result as well, and must not hide the others' results.
    except Exception as error:  # noqa: BLE001
        findings = [
            fail(f"the probe itself failed: {error!r}", f"leave it out: --skip {probe.name}")
        ]
    return _redact_result(combine_findings(probe.name, findings), context)


def _make_timeout_finding(limit_s: float) -> Finding:
    return fail(
        f"no answer within {limit_s:g} s", "find what hangs there, or leave the probe out by --skip"
    )


def _redact_result(result: ProbeResult, context: RunContext) -> ProbeResult:
    config = context.plan.config
    of_services = set(variables_of_any_service(context.plan)) - {*TINKER_PLACES}
    named = (config.notify.slack.token_env, config.notify.webhook_env or "", *of_services)
    hidden = (
        replace(f, detail=hide_secrets(f.detail, context.environ, named)) for f in result.findings
    )
    return replace(result, findings=tuple(hidden))


def find_unknown_probes(names: Collection[str]) -> list[str]:
    """Return the names that belong to no probe."""
    return sorted(set(names) - {probe.name for probe in PROBES})
