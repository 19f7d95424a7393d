"""`flotilla stop`: stops a run in good order, so that it can be resumed."""

from pathlib import Path

from services.launcher.cli.command_runner import with_run_launcher
from services.launcher.cli.launcher_client import LauncherConnection
from services.launcher.cli.run_view import STATE_NAMES
from services.launcher.cli.terminal import Terminal

# Time for releasing machines and verifying that they are gone.
RELEASE_TIMEOUT_S = 600.0


def stop_run(run_id: str, grace_s: float, runs: Path) -> int:
    """Stop a run. If its launcher died, a new launcher stops it."""

    async def request_stop(connection: LauncherConnection, found: str) -> None:
        answer = await connection.stop_run(grace_s, RELEASE_TIMEOUT_S, run_id=found)
        Terminal().print(f"run {found} {STATE_NAMES[answer.state]}")

    return with_run_launcher(run_id, runs, request_stop)
