"""`flotilla cancel`: stops the run that a request began, or prevents it from ever beginning."""

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.launcher.cli.command_runner import (
    FAILED,
    INTERRUPTED,
    OK,
    print_text,
    with_launcher,
)
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    LauncherConnection,
    describe_failure,
)
from services.launcher.cli.run_view import STATE_NAMES, format_cleanup

_CALL_S = 30.0


def cancel_request(request_id: str, runs: Path, grace_s: float) -> int:
    """Stop the run that a request began, or prevent it from ever beginning."""

    async def cancel_and_report(connection: LauncherConnection, interrupts: Interrupts) -> int:
        done = await _cancel_unless_interrupted(
            interrupts.unless_interrupted, connection, request_id, grace_s
        )
        return OK if done else INTERRUPTED if interrupts.first.is_set() else FAILED

    return with_launcher(runs, cancel_and_report)


async def _cancel_unless_interrupted(
    unless: Callable[[Coroutine[Any, Any, None]], Awaitable[None]],
    connection: LauncherConnection,
    request_id: str,
    grace_s: float,
) -> bool:
    """Cancel a request. Return False, with a hint, if the end of its run is not confirmed."""
    try:
        await unless(_send_cancel(connection, request_id, grace_s))
    except (InterruptedByUserError, grpc.aio.AioRpcError) as error:
        if isinstance(error, grpc.aio.AioRpcError):
            print_text(f"error: {describe_failure(error)}")
        print_text(f"the run may continue; stop it with: {connection.cancel_command(request_id)}")
        return False
    return True


async def _send_cancel(connection: LauncherConnection, request_id: str, grace_s: float) -> None:
    request = pb.StopRunRequest(request_id=request_id, grace=rpc.to_duration(grace_s))
    answer = await connection.await_answer(
        connection.stub.StopRun(request, timeout=grace_s + 600.0)
    )
    if not answer.run_id:
        print_text(f"request {request_id} began no run, and never will")
        return
    wanted = pb.GetRunRequest(run_id=answer.run_id)
    found = await connection.await_answer(connection.stub.GetRun(wanted, timeout=_CALL_S))
    print_text(
        f"run {answer.run_id} {STATE_NAMES[answer.state]}, machines: {format_cleanup(found.run)}"
    )
