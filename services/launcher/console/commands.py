"""`flotilla status`, `logs`, `scale` and `stop`."""

import asyncio
import json
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from rich.console import Console
from rich.table import Table

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.launcher import address_file, budget
from services.launcher.console.board import duration_text, raised
from services.launcher.console.connection import Connection, LauncherError, connected
from services.launcher.console.interrupts import InterruptedByUserError, Interrupts
from services.launcher.console.report import ALARMS_FILE
from services.launcher.console.views import numbers
from services.launcher.logs import read, sources, tail_position
from services.launcher.runs import Cleanup
from services.launcher.store import Store, StoredRun

_OK, _FAILED, _INTERRUPTED = 0, 1, 130
_STREAM_S = 60.0
_CALL_S = 30.0
# Until machines are given back, and seen to be gone.
_GIVEN_BACK_S = 600.0


# The learner's, in the folder of a run.
JOURNAL = "journal.sqlite"


class NoRunError(Exception):
    """The run that was asked for is not there."""


def status(run_id: str | None, runs: Path) -> int:
    """All runs, or one, from the ledger: it is there whether a launcher runs or not. A run whose
    launcher died is given another."""
    console = Console()
    try:
        if not all(stored.run.state.ended for stored in _ledger(runs)):
            _run(_watched_over(runs))
        if run_id is None:
            console.print(_all_runs(_ledger(runs)))
        else:
            _print_run(find(run_id, runs), runs, console)
    except NoRunError as error:
        return fail(str(error))
    return _OK


def logs(run_id: str, service: str, runs: Path, *, follow: bool, lines: int) -> int:
    """Log lines, from the launcher when following a live run, else from the files."""
    try:
        run_id = find(run_id, runs).run.run_id
    except NoRunError as error:
        return fail(str(error))
    if follow and not find(run_id, runs).run.state.ended:
        return _run(_follow_logs(run_id, service, runs, lines))
    console = Console()
    found = sources(runs / run_id, service)
    if not found:
        return fail(f"run {run_id} has no logs of {service or 'any service'}")
    for path in found.values():
        for line in read(path, tail_position(path, lines), limit=path.stat().st_size + 1):
            _print_line(console, line.source, line.text)
    return _OK


def scale(run_id: str, wishes: list[str], runs: Path) -> int:
    """Change numbers of replicas."""
    parsed: list[tuple[str, int]] = []
    for wish in wishes:
        service, equals, count = wish.partition("=")
        if not equals or not count.isdecimal():
            return fail(f"{wish!r}: write SERVICE=N, as in rollout=2")
        parsed.append((service, int(count)))

    async def work(connection: Connection, found: str) -> None:
        for service, count in parsed:
            request = pb.ScaleServiceRequest(run_id=found, service=service, replicas=count)
            await connection.stub.ScaleService(request, timeout=_CALL_S)
            Console().print(f"{service}={count}", highlight=False)

    return _on_run(run_id, runs, work)


def stop(run_id: str, grace_s: float, runs: Path) -> int:
    """Stop a run. Of a run whose launcher died, a new launcher does."""

    async def work(connection: Connection, found: str) -> None:
        request = pb.StopRunRequest(run_id=found, grace=rpc.duration(grace_s))
        answer = await connection.stub.StopRun(request, timeout=grace_s + _GIVEN_BACK_S)
        name = pb.RunState.Name(answer.state).removeprefix("RUN_STATE_").lower()
        Console().print(f"run {found} {name}", highlight=False)

    return _on_run(run_id, runs, work)


async def _watched_over(runs: Path) -> int:
    """See that a launcher is there; it stays for as long as runs go on."""
    interrupts = Interrupts()
    with interrupts.caught():
        async with connected(runs, interrupts, start=True):
            return _OK


def _on_run(run_id: str, runs: Path, work: Any) -> int:
    async def call() -> int:
        interrupts = Interrupts()
        found = find(run_id, runs).run.run_id
        with interrupts.caught():
            async with connected(runs, interrupts, start=True) as connection:
                await interrupts.unless(work(connection, found))
        return _OK

    return _run(call())


def _run(work: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(work)
    except (NoRunError, LauncherError) as error:
        return fail(str(error))
    except InterruptedByUserError:
        return _INTERRUPTED
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        return fail(known.message if known else f"{error.code().name}: {error.details()}")


async def _follow_logs(run_id: str, service: str, runs: Path, lines: int) -> int:
    console, interrupts = Console(), Interrupts()
    positions: dict[str, int] = {}
    over = False
    with interrupts.caught():
        while not over:
            async with connected(runs, interrupts, start=True) as connection:
                request = pb.TailLogsRequest(
                    run_id=run_id, service=service, follow=True, lines=lines
                )
                streaming = _stream_logs(connection, request, positions, console)
                over = await interrupts.unless(streaming)
    return _OK


async def _stream_logs(
    connection: Connection, request: pb.TailLogsRequest, positions: dict[str, int], console: Console
) -> bool:
    """Print lines until the run ends, going on after each cut where it was cut; false when the
    launcher is gone."""
    while True:
        request.after_bytes.clear()
        request.after_bytes.update(positions)
        try:
            async for line in connection.stub.TailLogs(request, timeout=_STREAM_S):
                positions[line.source] = line.after_bytes
                _print_line(console, line.source, line.line)
        except grpc.aio.AioRpcError as error:
            passing = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            if error.code() not in passing:
                raise
            if not connection.alive():
                return False
        else:
            return True


def fail(message: str) -> int:
    """Say what is wrong; returns the exit code."""
    Console().print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
    return _FAILED


def _print_line(console: Console, source: str, text: str) -> None:
    console.print(f"{source:14} {text}", markup=False, highlight=False, soft_wrap=True)


def _ledger(runs: Path) -> list[StoredRun]:
    path = runs / "launcher.sqlite"
    if not path.exists():
        raise NoRunError(f"there are no runs in {runs}; `flotilla train SPEC` makes one")
    store = Store(path)
    found = store.newest()
    store.close()
    return found


def find(run_id: str, runs: Path) -> StoredRun:
    """A run by its id, or the `newest`. Raises NoRunError."""
    ledger = _ledger(runs)
    for stored in ledger:
        if run_id in ("newest", stored.run.run_id):
            return stored
    raise NoRunError(f"there is no run {run_id!r} in {runs}; `flotilla status` lists them")


def run_dir_of(run_id: str, runs: Path) -> Path:
    """Of a run in the ledger, or of one that was started without a launcher. Raises NoRunError."""
    if run_id != "newest" and (runs / run_id / JOURNAL).exists():
        return runs / run_id
    return runs / find(run_id, runs).run.run_id


def _all_runs(ledger: list[StoredRun]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("RUN", "STATE", "MODE", "STARTED (UTC)", "TOOK", "PASS@1"):
        table.add_column(heading)
    for stored in ledger:
        run, shown = stored.run, numbers(stored.metrics)
        started = datetime.fromtimestamp(stored.created, UTC)
        took = duration_text((stored.ended or time.time()) - stored.created)
        cells = (run.run_id, run.state, run.mode, f"{started:%Y-%m-%d %H:%M:%S}", took)
        table.add_row(*cells, shown.get("pass@1", "-"))
    return table


def _ending(stored: StoredRun) -> str:
    """Where it runs, what it cost and may yet cost, and how it and its machines ended."""
    run = stored.run
    words = [f"backend {run.backend}"]
    if run.cost.accrued or run.cost.per_hour:
        words.append(f"cost ${run.cost.accrued:,.2f} (${run.cost.per_hour:,.2f}/h)")
        config = json.loads(stored.spec_json).get("launcher", {})
        hours = None if run.state.ended else config.get("max_hours")
        if parts := budget.by_service(stored.prices, run.wanted, hours):
            words.append(f"estimated ${sum(parts.values()):,.2f} by max_hours")
    if run.outcome:
        words.append(f"outcome {run.outcome}")
    if run.cleanup is not Cleanup.PENDING:
        words.append(f"cleanup {run.cleanup}: {run.cleanup_detail}".removesuffix(": "))
    return ", ".join(words)


def _print_run(stored: StoredRun, runs: Path, console: Console) -> None:
    run = stored.run
    console.print(f"{run.run_id}  {run.state}", style="bold", highlight=False)
    if not run.state.ended and address_file.read(runs) is None:
        console.print("its launcher is gone, and no other could take over")
    for said in (run.error, run.unreachable and f"the backend cannot be asked: {run.unreachable}"):
        if said:
            console.print(said, markup=False, highlight=False)
    console.print(_ending(stored), markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("SERVICE", "STATE", "PHASE", "ADDRESS", "RESTARTS", "PID"):
        table.add_column(heading)
    for key in sorted(run.replicas):
        replica = run.replicas[key]
        pid = str(replica.unit.pid) if replica.unit else "-"
        table.add_row(
            replica.label, replica.state, replica.phase, replica.address, str(replica.restarts), pid
        )
    console.print(table)
    for alarm in raised(stored.metrics):
        told = runs / run.run_id / ALARMS_FILE
        console.print(f"alarm: {alarm}, see {told}", style="red", highlight=False, soft_wrap=True)
    for name, value in sorted(stored.metrics.items()):
        console.print(f"{name} = {value:.6g}", highlight=False)
    console.print(f"files: {runs / run.run_id}", highlight=False, soft_wrap=True)
