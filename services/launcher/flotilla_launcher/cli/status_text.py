"""Output of `flotilla status`: one line per run, or all details of one run."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC

from rich.table import Table

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli.progress_view import ALARM_STYLES, format_metrics
from flotilla_launcher.cli.run_view import (
    ENDED,
    STATE_NAMES,
    alarm_text,
    count_tokens,
    duration_text,
    format_outcome,
)
from flotilla_launcher.cli.terminal import Terminal, make_table, print_table

_RATES = ("training pass@1", "held-out pass@1")
_QUIET_CLEANUPS = (pb.CLEANUP_UNSPECIFIED, pb.CLEANUP_PENDING)


def make_runs_table(
    runs: Sequence[pb.Run], columns: Mapping[str, Sequence[str]] | None = None
) -> Table:
    """Build a table with one line per run. `columns` have a cell for each run; by default they are
    the pass rates that any run reports."""
    columns = columns or _find_rates(runs)
    headings = ("RUN", "STATE", "MODE", "STARTED (UTC)", "TOOK", "COST", "STEP")
    table = make_table([*headings, *columns], no_wrap=True)
    for run, *chosen in zip(runs, *columns.values(), strict=True):
        mode = pb.RunMode.Name(run.mode).removeprefix("RUN_MODE_").lower()
        step = f"{run.step}/{run.total_steps}" if run.total_steps else "-"
        state = STATE_NAMES[run.state] + (f" ({run.queue_place})" if run.queue_place else "")
        cells = (run.run_id, state, mode, format_start(run), format_took(run))
        cost = f"${run.cost.accrued:,.2f}" if run.cost.accrued or run.cost.per_hour else "-"
        table.add_row(*cells, cost, step, *chosen)
    return table


def format_start(run: pb.Run) -> str:
    """Format when a run was created, in UTC."""
    return f"{run.create_time.ToDatetime(tzinfo=UTC):%Y-%m-%d %H:%M:%S}"


def format_took(run: pb.Run) -> str:
    """Format how long a run took, or has taken so far."""
    ended = run.end_time.ToSeconds() if run.HasField("end_time") else time.time()
    return duration_text(max(0.0, ended - run.create_time.ToSeconds()))


def _find_rates(runs: Sequence[pb.Run]) -> dict[str, list[str]]:
    figures = [format_metrics(run.metrics) for run in runs]
    rates = [name for name in _RATES if any(name in found for found in figures)]
    return {name.upper(): [found.get(name, "-") for found in figures] for name in rates}


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
    console.print(format_ending(run), soft_wrap=True)
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


def format_ending(run: pb.Run) -> str:
    """Format where a run is, its cost, its outcome, and the cleanup of its machines."""
    words = [f"backend {run.backend}"]
    if run.cost.accrued or run.cost.per_hour:
        words.append(f"cost ${run.cost.accrued:,.2f} (${run.cost.per_hour:,.2f}/h)")
        parts = run.cost.estimated_by_service
        if parts and run.state not in ENDED:
            words.append(f"estimated ${sum(parts.values()):,.2f} by max_hours")
    tokens = count_tokens(run.cost)
    if any(tokens.values()):
        limit = f" of {run.cost.max_tokens:,}" if run.cost.max_tokens else ""
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in tokens.items())
        words.append(f"tokens {sum(tokens.values()):,}{limit} ({kinds})")
    if run.outcome:
        words.append(f"outcome {format_outcome(run)}")
    if run.cleanup not in _QUIET_CLEANUPS:
        cleanup = pb.Cleanup.Name(run.cleanup).removeprefix("CLEANUP_").lower()
        words.append(f"cleanup {cleanup}: {run.cleanup_detail}".removesuffix(": "))
    return ", ".join(words)
