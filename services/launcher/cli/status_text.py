"""Output of `flotilla status`: one line per run, or all details of one run."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC

from rich.table import Table

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.launcher.cli.progress_view import ALARM_STYLES, format_metrics
from services.launcher.cli.run_view import (
    ENDED,
    STATE_NAMES,
    alarm_text,
    duration_text,
    format_outcome,
)
from services.launcher.cli.terminal import Terminal, make_table, print_table

_RATES = ("training pass@1", "held-out pass@1")
_QUIET_CLEANUPS = (pb.CLEANUP_UNSPECIFIED, pb.CLEANUP_PENDING)


def make_runs_table(runs: Sequence[pb.Run]) -> Table:
    """Build a table with one line per run, including the pass rates that any run reports."""
    figures = [format_metrics(run.metrics) for run in runs]
    rates = [name for name in _RATES if any(name in found for found in figures)]
    headings = ("RUN", "STATE", "MODE", "STARTED (UTC)", "TOOK", "COST", "STEP")
    table = make_table([*headings, *(name.upper() for name in rates)], no_wrap=True)
    for run, found in zip(runs, figures, strict=True):
        started = run.create_time.ToDatetime(tzinfo=UTC)
        ended = run.end_time.ToSeconds() if run.HasField("end_time") else time.time()
        took = duration_text(max(0.0, ended - run.create_time.ToSeconds()))
        mode = pb.RunMode.Name(run.mode).removeprefix("RUN_MODE_").lower()
        step = f"{run.step}/{run.total_steps}" if run.total_steps else "-"
        state = STATE_NAMES[run.state] + (f" ({run.queue_place})" if run.queue_place else "")
        cells = (run.run_id, state, mode, f"{started:%Y-%m-%d %H:%M:%S}", took)
        cost = f"${run.cost.accrued:,.2f}" if run.cost.accrued or run.cost.per_hour else "-"
        table.add_row(*cells, cost, step, *(found.get(name, "-") for name in rates))
    return table


def print_run(run: pb.Run, place: Callable[[str], str], console: Terminal, *, alone: bool) -> None:
    """Print one run. `place` formats the path of its files; `alone`: it has no launcher."""
    console.print(f"{run.run_id}  {STATE_NAMES[run.state]}", style="bold")
    if alone and run.state not in ENDED:
        console.print("its launcher is gone, and no other one could take over")
    if run.queue_place:
        console.print(f"place {run.queue_place} in the queue: {run.waiting}", soft_wrap=True)
    for text in (run.error, run.unreachable and f"the backend is unreachable: {run.unreachable}"):
        if text:
            console.print(text)
    console.print(_format_ending(run), soft_wrap=True)
    print_table(_make_replica_table(run), console)
    for alarm in run.alarms:
        style = ALARM_STYLES[alarm.severity]
        console.print(alarm_text(alarm), style=style, soft_wrap=True)
    for name, value in sorted(run.metrics.items()):
        console.print(f"{name} = {value:.6g}")
    console.print(f"files: {place(run.directory)}", soft_wrap=True)


def _make_replica_table(run: pb.Run) -> Table:
    shown = any(each.metrics_address for each in run.replicas)
    headings = ("SERVICE", "STATE", "PHASE", "ADDRESS", "RESTARTS", "PID")
    table = make_table([*headings, *(["METRICS"] if shown else [])], no_wrap=True)
    for each in run.replicas:
        label, pid = f"{each.service}-{each.replica}", str(each.pid) if each.pid else "-"
        cells = (label, each.state, each.phase, each.address, str(each.restarts), pid)
        table.add_row(*cells, *([_metrics_url(each)] if shown else []))
    return table


def _metrics_url(replica: pb.ServiceReplica) -> str:
    return f"http://{replica.metrics_address}/metrics" if replica.metrics_address else "-"


def _format_ending(run: pb.Run) -> str:
    words = [f"backend {run.backend}"]
    if run.cost.accrued or run.cost.per_hour:
        words.append(f"cost ${run.cost.accrued:,.2f} (${run.cost.per_hour:,.2f}/h)")
        parts = run.cost.estimated_by_service
        if parts and run.state not in ENDED:
            words.append(f"estimated ${sum(parts.values()):,.2f} by max_hours")
    if run.outcome:
        words.append(f"outcome {format_outcome(run)}")
    if run.cleanup not in _QUIET_CLEANUPS:
        cleanup = pb.Cleanup.Name(run.cleanup).removeprefix("CLEANUP_").lower()
        words.append(f"cleanup {cleanup}: {run.cleanup_detail}".removesuffix(": "))
    return ", ".join(words)
