"""`flotilla logs`: prints the last log lines of a run's services, and follows new ones."""

from pathlib import Path

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli.command_runner import OK, report_error, with_run_source
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.launcher_client import (
    TRANSIENT_CODES,
    LauncherConnection,
    ReconnectDeadline,
)
from flotilla_launcher.cli.log_lines import LogPrinter
from flotilla_launcher.cli.run_source import RunSource, find_run
from flotilla_launcher.cli.run_view import ENDED

_STREAM_S = 60.0


def show_logs(
    run_id: str, service: str, runs: Path, *, follow: bool, lines: int, as_json: bool
) -> int:
    """Print the last log lines of a run; with `follow`, new ones until the run ends."""
    printer = LogPrinter(as_json=as_json)

    async def tail_logs(known: RunSource, interrupts: Interrupts) -> int:
        run = await interrupts.unless_interrupted(find_run(known, run_id))
        request = pb.TailLogsRequest(run_id=run.run_id, service=service, lines=lines)
        if follow and run.state not in ENDED:
            request.follow = True
            return await _follow_logs(known, interrupts, request, printer)
        return await interrupts.unless_interrupted(_print_recent_logs(known, request, printer))

    return with_run_source(runs, tail_logs)


async def _print_recent_logs(
    known: RunSource, request: pb.TailLogsRequest, printer: LogPrinter
) -> int:
    some = False
    async for line in known.read_logs(request):
        some = True
        printer.print_line(line.source, line.line)
    if some or not request.lines:
        return OK
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
    return OK


async def _stream_logs(
    connection: LauncherConnection,
    request: pb.TailLogsRequest,
    positions: dict[str, int],
    printer: LogPrinter,
) -> bool:
    """Print lines until the run ends, and resume each broken stream at its position. Return
    False if the launcher is gone and another one may take over."""
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
