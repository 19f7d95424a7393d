"""`flotilla stop`: stops a run gracefully, so that it can be resumed."""

from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.launcher.cli.command_runner import with_run_launcher
from services.launcher.cli.launcher_client import (
    LauncherConnection,
)
from services.launcher.cli.run_view import STATE_NAMES
from services.launcher.cli.terminal import Terminal

# Time for releasing machines and verifying that they are gone.
_RELEASE_TIMEOUT_S = 600.0


def stop_run(run_id: str, grace_s: float, runs: Path) -> int:
    """Stop a run. If its launcher is dead, a new launcher stops it."""

    async def request_stop(connection: LauncherConnection, found: str) -> None:
        request = pb.StopRunRequest(run_id=found, grace=rpc.to_duration(grace_s))
        call = connection.stub.StopRun(request, timeout=grace_s + _RELEASE_TIMEOUT_S)
        answer = await connection.await_answer(call)
        Terminal().print(f"run {found} {STATE_NAMES[answer.state]}")

    return with_run_launcher(run_id, runs, request_stop)
