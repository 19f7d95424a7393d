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
from services.launcher.cli.launcher_client import PASSING, Connection, LauncherError, Patience, told
from services.launcher.cli.log_lines import LogPrinter
from services.launcher.cli.run_source import KnownRuns, NoRunError, find_here, known_runs, look_up
from services.launcher.cli.run_view import ENDED, STATE_NAMES
from services.launcher.cli.status_json import status_json
from services.launcher.cli.status_text import all_runs, print_run, print_table
from services.launcher.cli.terminal import Terminal
from services.launcher.launcher_address import REMOTE_VARIABLE
from services.launcher.store.ledger import StoredRun

_OK, _FAILED, _INTERRUPTED = 0, 1, 130
_STREAM_S = 60.0
_CALL_S = 30.0
# Until machines are given back, and seen to be gone.
_GIVEN_BACK_S = 600.0

# The learner's, in the folder of a run.
JOURNAL = "journal.sqlite"


def status(run_id: str | None, runs: Path, *, as_json: bool = False) -> int:
    """All runs, or one."""
    console = Terminal()

    async def work(known: KnownRuns, interrupts: Interrupts) -> int:
        problem = await _unattended(known)
        if problem:
            Terminal(stderr=as_json).print(f"error: {problem}")
        if run_id is None:
            found = await interrupts.unless(known.newest())
        else:
            found = [await interrupts.unless(look_up(known, run_id))]
        if as_json:
            say(status_json(found, attended=not problem))
        elif run_id is None:
            print_table(all_runs(found), console)
        else:
            print_run(found[0], known.place, console, alone=bool(problem))
        return _OK

    return with_known(runs, work)


def logs(run_id: str, service: str, runs: Path, *, follow: bool, lines: int, as_json: bool) -> int:
    """The last log lines, and those of a live run as they come."""
    printer = LogPrinter(as_json=as_json)

    async def work(known: KnownRuns, interrupts: Interrupts) -> int:
        run = await interrupts.unless(look_up(known, run_id))
        request = pb.TailLogsRequest(run_id=run.run_id, service=service, lines=lines)
        if follow and run.state not in ENDED:
            request.follow = True
            return await _follow_logs(known, interrupts, request, printer)
        return await interrupts.unless(_print_logs(known, request, printer))

    return with_known(runs, work)


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
            await connection.ask(connection.stub.ScaleService(request, timeout=_CALL_S))
            Terminal().print(f"{service}={count}")

    return _on_run(run_id, runs, work)


def stop(run_id: str, grace_s: float, runs: Path) -> int:
    """Stop a run. Of a run whose launcher died, a new launcher does."""

    async def work(connection: Connection, found: str) -> None:
        request = pb.StopRunRequest(run_id=found, grace=rpc.duration(grace_s))
        call = connection.stub.StopRun(request, timeout=grace_s + _GIVEN_BACK_S)
        answer = await connection.ask(call)
        Terminal().print(f"run {found} {STATE_NAMES[answer.state]}")

    return _on_run(run_id, runs, work)


async def _unattended(known: KnownRuns) -> str:
    """Why runs that go on have no launcher, or nothing; what is known is shown all the same."""
    try:
        await known.attend()
    except LauncherError as error:
        return str(error)
    return ""


def _on_run(run_id: str, runs: Path, work: Callable[[Connection, str], Awaitable[None]]) -> int:
    async def call(known: KnownRuns, interrupts: Interrupts) -> int:
        found = (await interrupts.unless(look_up(known, run_id))).run_id

        async def done(connection: Connection) -> None:
            await work(connection, found)

        async with known.launcher() as connection:
            await interrupts.unless(done(connection))
        return _OK

    return with_known(runs, call)


def with_known(runs: Path, work: Callable[[KnownRuns, Interrupts], Awaitable[int]]) -> int:
    """Do `work` with the runs that are known, and turn what goes wrong into a message and an exit
    code."""

    async def main() -> int:
        interrupts = Interrupts()
        with interrupts.caught():
            async with known_runs(runs, interrupts) as known:
                return await work(known, interrupts)

    try:
        return asyncio.run(main())
    except (NoRunError, LauncherError, ConfigError) as error:
        return fail(str(error))
    except InterruptedByUserError:
        return _INTERRUPTED
    except grpc.aio.AioRpcError as error:
        return fail(told(error))


async def _print_logs(known: KnownRuns, request: pb.TailLogsRequest, printer: LogPrinter) -> int:
    some = False
    async for line in known.logged(request):
        some = True
        printer.line(line.source, line.line)
    if some or not request.lines:
        return _OK
    return fail(f"run {request.run_id} has no logs of {request.service or 'any service'}")


async def _follow_logs(
    known: KnownRuns, interrupts: Interrupts, request: pb.TailLogsRequest, printer: LogPrinter
) -> int:
    over = False
    positions: dict[str, int] = {}
    while not over:
        async with known.launcher() as connection:
            streaming = _stream_logs(connection, request, positions, printer)
            over = await interrupts.unless(streaming)
    return _OK


async def _stream_logs(
    connection: Connection,
    request: pb.TailLogsRequest,
    positions: dict[str, int],
    printer: LogPrinter,
) -> bool:
    """Print lines until the run ends, going on after each cut where it was cut; false when the
    launcher is gone, and another may be had."""
    patience = Patience(connection)
    while True:
        request.after_bytes.clear()
        request.after_bytes.update(positions)
        try:
            async for line in connection.stub.TailLogs(request, timeout=_STREAM_S):
                positions[line.source] = line.after_bytes
                printer.line(line.source, line.line)
        except grpc.aio.AioRpcError as error:
            if error.code() not in PASSING:
                raise
            if not connection.alive():
                return False
            if connection.address.elsewhere:
                await patience.outlast(error)
        else:
            return True


def fail(message: str) -> int:
    """Say what is wrong; returns the exit code."""
    Terminal().print(f"error: {message}", soft_wrap=True)
    return _FAILED


def find(run_id: str, runs: Path) -> StoredRun:
    """A run of which files are to be read, by its id or the `newest`. Raises NoRunError."""
    try:
        return find_here(run_id, runs)
    except NoRunError as error:
        if not os.environ.get(REMOTE_VARIABLE, "").strip():
            raise
        message = (
            f"there is no run {run_id!r} in {runs}, and this command reads a run's files: run it"
            f" where the launcher that {REMOTE_VARIABLE} names runs, in its folder"
        )
        raise NoRunError(message) from error


def run_dir_of(run_id: str, runs: Path) -> Path:
    """Of a run in the ledger, or of one that was started without a launcher. Raises NoRunError."""
    if run_id != "newest" and (runs / run_id / JOURNAL).exists():
        return runs / run_id
    return runs / find(run_id, runs).run.run_id
