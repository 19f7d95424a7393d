"""`flotilla watch`, and detaching from a run that continues."""

import time
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.launcher.cli import command_hints, train_report
from services.launcher.cli.command_runner import report_error, with_run_source
from services.launcher.cli.follow_run import MAX_LAUNCHERS, FollowedRun, watch_to_end
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import LauncherConnection, LauncherGoneError
from services.launcher.cli.progress_view import ProgressView, RunConsole, open_view
from services.launcher.cli.run_source import RunSource, find_run
from services.launcher.cli.run_view import ENDED, STATE_NAMES
from services.launcher.cli.terminal import Terminal

_OK, _FAILED, _INTERRUPTED = 0, 1, 130


def watch_run(run_id: str, runs: Path) -> int:
    """Follow any run to its end. Ctrl-C only stops watching."""
    console = RunConsole()

    async def follow_and_report(known: RunSource, interrupts: Interrupts) -> int:
        run = await interrupts.unless_interrupted(find_run(known, run_id))
        console.print(f"Run {run.run_id} {STATE_NAMES[run.state]}")
        if run.state not in ENDED:
            followed = FollowedRun(int(time.time()), run.run_id)
            with open_view(console) as view:
                left = not await _follow_to_end(known, followed, view, interrupts)
            if left:
                print_detach_hints(
                    console,
                    run.run_id,
                    runs,
                    command_hints.format_command("stop", run.run_id, runs=runs),
                )
                return _INTERRUPTED
            run = await known.get_run(run.run_id)
        return _print_conclusion(run, runs, console)

    return with_run_source(runs, follow_and_report)


async def _follow_to_end(
    known: RunSource, followed: FollowedRun, view: ProgressView, interrupts: Interrupts
) -> bool:
    """Follow the run across launchers; return True at its end, False if the user has left."""
    for left in reversed(range(MAX_LAUNCHERS)):
        try:
            async with known.open_launcher() as connection:
                return await watch_until_left(connection, followed, view, interrupts)
        except LauncherGoneError:
            if not left:
                raise
            view.show_line("The launcher has died; another one takes over.")
    return False


async def watch_until_left(
    connection: LauncherConnection,
    followed: FollowedRun,
    view: ProgressView,
    interrupts: Interrupts,
) -> bool:
    """Follow the run; return True at its end, False if the user has left. A launcher started by
    this command keeps running. Raises LauncherError, AioRpcError."""
    try:
        problem = await interrupts.unless_interrupted(
            watch_to_end(connection, followed, view, interrupts)
        )
    except InterruptedByUserError:
        return False
    if problem is not None:
        raise problem
    return True


def print_detach_hints(console: Terminal, run_id: str, runs: Path, stopping: str) -> None:
    """Print that the run continues, and the commands that follow or stop it."""
    lines = (
        f"Run {run_id} continues.",
        f"  {command_hints.format_command('watch', run_id, runs=runs)}   follows it",
        f"  {stopping}   stops it",
    )
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_conclusion(run: pb.Run, runs: Path, console: Terminal) -> int:
    if run.state == pb.RUN_STATE_COMPLETED:
        evaluated = run.mode == pb.RUN_MODE_EVAL_ONLY
        train_report.print_report(runs / run.run_id, console, evaluated=evaluated)
        return _OK
    if run.state == pb.RUN_STATE_FAILED:
        return report_error(f"run {run.run_id} failed: {run.error}")
    console.print(f"Run {run.run_id} was stopped.")
    return _FAILED
