"""`flotilla cancel`: stops the run that a request began, or prevents it from ever beginning."""

from pathlib import Path

import grpc.aio

from services.launcher.cli.command_runner import FAILED, INTERRUPTED, OK, print_text, with_launcher
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import LauncherConnection, describe_failure
from services.launcher.cli.run_view import STATE_NAMES, format_cleanup
from services.launcher.cli.stop import RELEASE_TIMEOUT_S

_CALL_S = 30.0


def cancel_request(request_id: str, runs: Path, grace_s: float) -> int:
    """Stop the run that a request began, and prevent the request from beginning one later."""

    async def cancel_and_report(connection: LauncherConnection, interrupts: Interrupts) -> int:
        code, cancel = FAILED, _cancel_request(connection, request_id, grace_s)
        try:
            await interrupts.unless_interrupted(cancel)
        except InterruptedByUserError:
            code = INTERRUPTED
        except grpc.aio.AioRpcError as error:
            print_text(f"error: {describe_failure(error)}")
        else:
            return OK
        print_text(f"the run may continue; stop it with: {connection.cancel_command(request_id)}")
        return code

    return with_launcher(runs, cancel_and_report)


async def _cancel_request(connection: LauncherConnection, request_id: str, grace_s: float) -> None:
    answer = await connection.stop_run(grace_s, RELEASE_TIMEOUT_S, request_id=request_id)
    if not answer.run_id:
        print_text(f"request {request_id} began no run, and never will")
        return
    run = await connection.get_run(answer.run_id, _CALL_S)
    print_text(f"run {answer.run_id} {STATE_NAMES[answer.state]}, machines: {format_cleanup(run)}")
