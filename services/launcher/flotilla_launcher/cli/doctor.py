"""`flotilla doctor`: finds the causes that would make a run fail, before it costs money."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import canonical_json, did_you_mean
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.text.printable_text import print_json
from flotilla_launcher.cli.command_runner import FAILED, OK, report_error
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.doctor.findings import ProbeResult, Status, combine_findings
from flotilla_launcher.doctor.findings import fail as failing
from flotilla_launcher.doctor.probe_list import PROBES
from flotilla_launcher.doctor.run_context import make_run_context
from flotilla_launcher.doctor.run_probes import SPEC, examine_run, find_unknown_probes
from flotilla_launcher.run_spec import parse_spec

_COLOURS = {
    Status.OK: "green",
    Status.WARN: "yellow",
    Status.FAIL: "bold red",
    Status.SKIPPED: "dim",
}


def run_doctor(
    spec: Path,
    runs: Path,
    skip: Sequence[str],
    overrides: Sequence[str],
    *,
    as_json: bool,
    gpus: tuple[int, ...] = (),
) -> int:
    """Examine a spec and return the exit code: 1 if a probe failed."""
    if wrong := find_unknown_probes(skip):
        names = [probe.name for probe in PROBES]
        return report_error(f"--skip {wrong[0]}: no such probe{did_you_mean(wrong[0], names)}")
    try:
        plan = parse_spec(canonical_json(load_spec(spec, overrides)))
        context = make_run_context(plan, runs, os.environ)
        context = replace(context, gpus=gpus)
    except ConfigError as error:
        results = [combine_findings(SPEC, [failing(str(error), "correct the spec")])]
    else:
        results = asyncio.run(examine_run(context, skip))
    if as_json:
        print_json([result.to_dict() for result in results])
    else:
        _print_results(results)
    return FAILED if any(result.status is Status.FAIL for result in results) else OK


def _print_results(results: Sequence[ProbeResult]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("PROBE", "STATUS", "DETAIL"):
        table.add_column(heading, no_wrap=heading != "DETAIL", overflow="fold")
    for result in results:
        colour = _COLOURS[result.status]
        table.add_row(result.probe, Text(result.status, style=colour), Text(result.detail))
    console = Terminal()
    console.print(table)
    failed = [result.probe for result in results if result.status is Status.FAIL]
    if failed:
        console.print(f"\nThis run would fail: {', '.join(failed)}.", style="bold")
