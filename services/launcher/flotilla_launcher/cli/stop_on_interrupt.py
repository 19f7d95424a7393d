"""Stop of a run on Ctrl-C: the first lets its services finish and save their work, the second
stops it at once. If the run has not begun yet, the first cancels the request, and the second stops
waiting for the answer."""

import asyncio
from contextlib import suppress

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.launcher_client import (
    LauncherConnection,
    LauncherError,
    LauncherGoneError,
)
from flotilla_launcher.cli.progress_view import ProgressView

_STOP_GRACE_S = 30.0
# Time for the end of a run after its grace, while others watch it and while nothing else does.
_WATCHED_STOP_S, _STOP_S = 60.0, 180.0


async def stop_on_interrupt(
    connection: LauncherConnection, run_id: str, view: ProgressView, interrupts: Interrupts
) -> None:
    """Stop the run on the first interrupt, with a grace; on the second, with none."""

    async def stop(grace_s: float) -> None:
        # The view of the run shows how it ends, and whether the launcher is alive at all.
        with suppress(grpc.aio.AioRpcError, LauncherGoneError):
            await connection.stop_run(grace_s, _WATCHED_STOP_S, run_id=run_id)

    await interrupts.first.wait()
    view.show_line("Stopping: services finish and save their work. Ctrl-C again stops at once.")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stop(_STOP_GRACE_S))
        await interrupts.second.wait()
        view.show_line("Stopping at once.")
        tasks.create_task(stop(0.0))


async def cancel_request(
    connection: LauncherConnection, request_id: str, interrupts: Interrupts
) -> pb.Run | None:
    """Cancel the request; return its run, which is now stopped, or None if it began none and never
    will. Raises LauncherError if that cannot be determined."""

    async def stop_begun_run() -> pb.Run | None:
        answer = await connection.stop_run(_STOP_GRACE_S, _STOP_S, request_id=request_id)
        return await connection.get_run(answer.run_id) if answer.run_id else None

    try:
        return await interrupts.unless_interrupted_twice(stop_begun_run())
    except (InterruptedByUserError, LauncherGoneError, grpc.aio.AioRpcError) as error:
        what = "the run may have begun and may continue; stop it with"
        raise LauncherError(f"{what}: {connection.cancel_command(request_id)}") from error
