"""`flotilla status`, `logs`, `scale` and `stop`."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.common.errors import ConfigError
from services.common.text import say
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    TRANSIENT_CODES,
    LauncherConnection,
    LauncherError,
    ReconnectDeadline,
    describe_failure,
)
from services.launcher.cli.log_lines import LogPrinter
from services.launcher.cli.run_source import (
    NoRunError,
    RunSource,
    find_local_run,
    find_run,
    open_run_source,
)
from services.launcher.cli.run_view import ENDED, STATE_NAMES
from services.launcher.cli.status_json import format_status_json
from services.launcher.cli.status_text import make_runs_table, print_run, print_table
from services.launcher.cli.terminal import Terminal
from services.launcher.security.launcher_address import REMOTE_VARIABLE
from services.launcher.store.ledger import StoredRun

_OK, _FAILED, _INTERRUPTED = 0, 1, 130
_STREAM_S = 60.0
_CALL_S = 30.0
# Until machines are given back, and seen to be gone.
_RELEASE_TIMEOUT_S = 600.0

# The learner's, in the folder of a run.
JOURNAL = "journal.sqlite"


def show_status(run_id: str | None, runs: Path, *, as_json: bool = False) -> int:
    """Show all runs, or one."""
    console = Terminal()

    async def show_found(known: RunSource, interrupts: Interrupts) -> int:
        problem = await _ensure_attended(known)
        if problem:
            Terminal(stderr=as_json).print(f"error: {problem}")
        if run_id is None:
            found = await interrupts.unless_interrupted(known.list_runs())
        else:
            found = [await interrupts.unless_interrupted(find_run(known, run_id))]
        if as_json:
            say(format_status_json(found, attended=not problem))
        elif run_id is None:
            print_table(make_runs_table(found), console)
        else:
            print_run(found[0], known.display_path, console, alone=bool(problem))
        return _OK

    return with_run_source(runs, show_found)


def show_logs(
    run_id: str, service: str, runs: Path, *, follow: bool, lines: int, as_json: bool
) -> int:
    """Print the last log lines, and for a live run new ones as they come."""
    printer = LogPrinter(as_json=as_json)

    async def tail_logs(known: RunSource, interrupts: Interrupts) -> int:
        run = await interrupts.unless_interrupted(find_run(known, run_id))
        request = pb.TailLogsRequest(run_id=run.run_id, service=service, lines=lines)
        if follow and run.state not in ENDED:
            request.follow = True
            return await _follow_logs(known, interrupts, request, printer)
        return await interrupts.unless_interrupted(_print_recent_logs(known, request, printer))

    return with_run_source(runs, tail_logs)


def scale_services(run_id: str, wishes: list[str], runs: Path) -> int:
    """Change the number of replicas of services."""
    parsed: list[tuple[str, int]] = []
    for wish in wishes:
        service, equals, count = wish.partition("=")
        if not equals or not count.isdecimal():
            return report_error(f"{wish!r}: write SERVICE=N, as in rollout=2")
        parsed.append((service, int(count)))

    async def scale_each(connection: LauncherConnection, found: str) -> None:
        for service, count in parsed:
            request = pb.ScaleServiceRequest(run_id=found, service=service, replicas=count)
            await connection.await_answer(connection.stub.ScaleService(request, timeout=_CALL_S))
            Terminal().print(f"{service}={count}")

    return _with_run(run_id, runs, scale_each)


def stop_run(run_id: str, grace_s: float, runs: Path) -> int:
    """Stop a run. If its launcher died, a new launcher stops it."""

    async def request_stop(connection: LauncherConnection, found: str) -> None:
        request = pb.StopRunRequest(run_id=found, grace=rpc.to_duration(grace_s))
        call = connection.stub.StopRun(request, timeout=grace_s + _RELEASE_TIMEOUT_S)
        answer = await connection.await_answer(call)
        Terminal().print(f"run {found} {STATE_NAMES[answer.state]}")

    return _with_run(run_id, runs, request_stop)


async def _ensure_attended(known: RunSource) -> str:
    """Ensure that live runs have a launcher; return the problem if one cannot be had, else "".
    Known runs are shown in either case."""
    try:
        await known.ensure_attended()
    except LauncherError as error:
        return str(error)
    return ""


def _with_run(
    run_id: str, runs: Path, work: Callable[[LauncherConnection, str], Awaitable[None]]
) -> int:
    async def call_launcher(known: RunSource, interrupts: Interrupts) -> int:
        found = (await interrupts.unless_interrupted(find_run(known, run_id))).run_id

        async def do_work(connection: LauncherConnection) -> None:
            await work(connection, found)

        async with known.open_launcher() as connection:
            await interrupts.unless_interrupted(do_work(connection))
        return _OK

    return with_run_source(runs, call_launcher)


def with_run_source(runs: Path, work: Callable[[RunSource, Interrupts], Awaitable[int]]) -> int:
    """Call `work` with the run source, and turn errors into a message and an exit code."""

    async def main() -> int:
        interrupts = Interrupts()
        with interrupts.catch_signals():
            async with open_run_source(runs, interrupts) as known:
                return await work(known, interrupts)

    try:
        return asyncio.run(main())
    except (NoRunError, LauncherError, ConfigError) as error:
        return report_error(str(error))
    except InterruptedByUserError:
        return _INTERRUPTED
    except grpc.aio.AioRpcError as error:
        return report_error(describe_failure(error))


async def _print_recent_logs(
    known: RunSource, request: pb.TailLogsRequest, printer: LogPrinter
) -> int:
    some = False
    async for line in known.read_logs(request):
        some = True
        printer.print_line(line.source, line.line)
    if some or not request.lines:
        return _OK
    return report_error(f"run {request.run_id} has no logs of {request.service or 'any service'}")


async def _follow_logs(
    known: RunSource, interrupts: Interrupts, request: pb.TailLogsRequest, printer: LogPrinter
) -> int:
    over = False
    positions: dict[str, int] = {}
    while not over:
        async with known.open_launcher() as connection:
            streaming = _stream_logs(connection, request, positions, printer)
            over = await interrupts.unless_interrupted(streaming)
    return _OK


async def _stream_logs(
    connection: LauncherConnection,
    request: pb.TailLogsRequest,
    positions: dict[str, int],
    printer: LogPrinter,
) -> bool:
    """Print lines until the run ends, and resume each cut stream at its position. Return False
    if the launcher is gone and another may take over."""
    patience = ReconnectDeadline(connection)
    while True:
        request.after_bytes.clear()
        request.after_bytes.update(positions)
        try:
            async for line in connection.stub.TailLogs(request, timeout=_STREAM_S):
                positions[line.source] = line.after_bytes
                printer.print_line(line.source, line.line)
        except grpc.aio.AioRpcError as error:
            if error.code() not in TRANSIENT_CODES:
                raise
            if not connection.is_alive():
                return False
            if connection.address.elsewhere:
                await patience.retry_after_cut(error)
        else:
            return True


def report_error(message: str) -> int:
    """Print an error message and return the exit code."""
    Terminal().print(f"error: {message}", soft_wrap=True)
    return _FAILED


def find_stored_run(run_id: str, runs: Path) -> StoredRun:
    """Return a stored run whose files are to be read, by its id or `newest`. Raises NoRunError."""
    try:
        return find_local_run(run_id, runs)
    except NoRunError as error:
        if not os.environ.get(REMOTE_VARIABLE, "").strip():
            raise
        message = (
            f"there is no run {run_id!r} in {runs}, and this command reads a run's files: run it"
            f" where the launcher that {REMOTE_VARIABLE} names runs, in its folder"
        )
        raise NoRunError(message) from error


def find_run_dir(run_id: str, runs: Path) -> Path:
    """Return the folder of a run in the ledger, or of one that was started without a launcher.
    Raises NoRunError."""
    if run_id != "newest" and (runs / run_id / JOURNAL).exists():
        return runs / run_id
    return runs / find_stored_run(run_id, runs).run.run_id
