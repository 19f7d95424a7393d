"""Stop of a run on Ctrl-C: the first asks its services to finish and save what they do, the second
stops it at once. Of a run that has not begun yet, the first cancels the request, and the second
stops waiting for that."""

import asyncio
from contextlib import suppress

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.rpc import to_duration
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import (
    LauncherConnection,
    LauncherError,
    LauncherGoneError,
)
from services.launcher.cli.progress_view import ProgressView

_STOP_GRACE_S = 30.0
# What the end of a run may take after its grace.
_STOP_TIMEOUT_S = 180.0


async def stop_on_interrupt(
    connection: LauncherConnection, run_id: str, view: ProgressView, interrupts: Interrupts
) -> None:
    """Stop the run on the first interrupt, with a grace; on the second, with none."""
    await interrupts.first.wait()
    view.show_line(
        "Stopping: services finish what they do and save it. Ctrl-C again stops at once."
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_stop_run(connection, run_id, _STOP_GRACE_S))
        await interrupts.second.wait()
        view.show_line("Stopping at once.")
        tasks.create_task(_stop_run(connection, run_id, 0.0))


async def _stop_run(connection: LauncherConnection, run_id: str, grace_s: float) -> None:
    request = pb.StopRunRequest(run_id=run_id, grace=to_duration(grace_s))
    # Whoever watches the run sees how it ends, and whether the launcher is there at all.
    with suppress(grpc.aio.AioRpcError, LauncherGoneError):
        await connection.await_answer(connection.stub.StopRun(request, timeout=grace_s + 60.0))


async def cancel_request(
    connection: LauncherConnection, request_id: str, interrupts: Interrupts
) -> pb.Run | None:
    """Cancel the request; return the run that had begun and is now stopped, or None if none has
    begun and none will. Raises LauncherError if that cannot be determined."""

    async def stop_begun_run() -> pb.Run | None:
        request = pb.StopRunRequest(request_id=request_id, grace=to_duration(_STOP_GRACE_S))
        call = connection.stub.StopRun(request, timeout=_STOP_GRACE_S + _STOP_TIMEOUT_S)
        answer = await connection.await_answer(call)
        if not answer.run_id:
            return None
        wanted = pb.GetRunRequest(run_id=answer.run_id)
        return (await connection.await_answer(connection.stub.GetRun(wanted))).run

    try:
        return await interrupts.unless_interrupted_twice(stop_begun_run())
    except (InterruptedByUserError, LauncherGoneError, grpc.aio.AioRpcError) as error:
        what = "it is not known whether the run has begun, and it may go on"
        raise LauncherError(f"{what}: {connection.cancel_command(request_id)}") from error
