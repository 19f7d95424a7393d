"""`flotilla stop` and `cancel`: stop a run in good order, so that it can be resumed."""

from pathlib import Path

import grpc.aio

from flotilla_launcher.cli.command_runner import (
    FAILED,
    INTERRUPTED,
    OK,
    print_text,
    with_launcher,
    with_run_launcher,
)
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.launcher_client import LauncherConnection, describe_failure
from flotilla_launcher.cli.run_view import STATE_NAMES, format_cleanup
from flotilla_launcher.cli.terminal import Terminal

# Time for releasing machines and verifying that they are gone.
_RELEASE_TIMEOUT_S = 600.0
_CALL_S = 30.0


def stop_run(run_id: str, grace_s: float, runs: Path) -> int:
    """Stop a run. If its launcher died, a new launcher stops it."""

    async def request_stop(connection: LauncherConnection, found: str) -> None:
        answer = await connection.stop_run(grace_s, _RELEASE_TIMEOUT_S, run_id=found)
        Terminal().print(f"run {found} {STATE_NAMES[answer.state]}")

    return with_run_launcher(run_id, runs, request_stop)


def stop_request(request_id: str, grace_s: float, runs: Path) -> int:
    """Stop the run that a request began, and prevent the request from beginning one later."""

    async def stop_and_report(connection: LauncherConnection, interrupts: Interrupts) -> int:
        code, stop = FAILED, _stop_request(connection, request_id, grace_s)
        try:
            await interrupts.unless_interrupted(stop)
        except InterruptedByUserError:
            code = INTERRUPTED
        except grpc.aio.AioRpcError as error:
            print_text(f"error: {describe_failure(error)}")
        else:
            return OK
        print_text(f"the run may continue; stop it with: {connection.cancel_command(request_id)}")
        return code

    return with_launcher(runs, stop_and_report)


async def _stop_request(connection: LauncherConnection, request_id: str, grace_s: float) -> None:
    answer = await connection.stop_run(grace_s, _RELEASE_TIMEOUT_S, request_id=request_id)
    if not answer.run_id:
        print_text(f"request {request_id} began no run, and never will")
        return
    run = await connection.get_run(answer.run_id, _CALL_S)
    print_text(f"run {answer.run_id} {STATE_NAMES[answer.state]}, machines: {format_cleanup(run)}")
