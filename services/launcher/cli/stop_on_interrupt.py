"""Stop of a run on Ctrl-C: after the first one its services finish and save their work, the second
one stops it at once. Before the run has begun, the first one cancels the request, and the second
one stops waiting for that."""

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
# Time for the end of a run after its grace.
_STOP_TIMEOUT_S = 180.0


async def stop_on_interrupt(
    connection: LauncherConnection, run_id: str, view: ProgressView, interrupts: Interrupts
) -> None:
    """Stop the run on the first interrupt, with a grace period; on the second, at once."""
    await interrupts.first.wait()
    view.show_line("Stopping: services finish and save their work. Ctrl-C again stops at once.")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_stop_run(connection, run_id, _STOP_GRACE_S))
        await interrupts.second.wait()
        view.show_line("Stopping at once.")
        tasks.create_task(_stop_run(connection, run_id, 0.0))


async def _stop_run(connection: LauncherConnection, run_id: str, grace_s: float) -> None:
    request = pb.StopRunRequest(run_id=run_id, grace=to_duration(grace_s))
    # The watcher of the run reports its end, or the loss of the launcher.
    with suppress(grpc.aio.AioRpcError, LauncherGoneError):
        await connection.await_answer(connection.stub.StopRun(request, timeout=grace_s + 60.0))


async def cancel_request(
    connection: LauncherConnection, request_id: str, interrupts: Interrupts
) -> pb.Run | None:
    """Cancel the request; return its run, which is now stopped, or None if it began none and never
    will. Raises LauncherError if that cannot be determined."""

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
        what = "the run may have begun and may continue; stop it with"
        raise LauncherError(f"{what}: {connection.cancel_command(request_id)}") from error
