"""`flotilla watch`, and how whoever follows a run leaves it: the run goes on."""

import time
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.launcher.cli import hints, report
from services.launcher.cli.commands import fail, with_known
from services.launcher.cli.follow import SUCCESSORS, Followed, watch_to_end
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import Connection, LauncherGoneError
from services.launcher.cli.progress_view import RunConsole, View, viewing
from services.launcher.cli.run_source import KnownRuns, look_up
from services.launcher.cli.run_view import ENDED, STATE_NAMES
from services.launcher.cli.terminal import Terminal

_OK, _FAILED, _INTERRUPTED = 0, 1, 130


def watch(run_id: str, runs: Path) -> int:
    """Follow a run to its end, whoever started it. Ctrl-C only stops watching."""
    console = RunConsole()

    async def work(known: KnownRuns, interrupts: Interrupts) -> int:
        run = await interrupts.unless(look_up(known, run_id))
        console.print(f"Run {run.run_id} {STATE_NAMES[run.state]}")
        if run.state not in ENDED:
            followed = Followed(int(time.time()), run.run_id)
            with viewing(console) as view:
                left = not await _followed(known, followed, view, interrupts)
            if left:
                leave(console, run.run_id, runs, hints.command("stop", run.run_id, runs=runs))
                return _INTERRUPTED
            run = await known.get(run.run_id)
        return _conclude(run, runs, console)

    return with_known(runs, work)


async def _followed(
    known: KnownRuns, followed: Followed, view: View, interrupts: Interrupts
) -> bool:
    """Whether the run was followed to its end, under whichever launcher; else the user has left."""
    for left in reversed(range(SUCCESSORS)):
        try:
            async with known.launcher() as connection:
                return await stayed(connection, followed, view, interrupts)
        except LauncherGoneError:
            if not left:
                raise
            view.line("The launcher has died; another one takes over.")
    return False


async def stayed(
    connection: Connection, followed: Followed, view: View, interrupts: Interrupts
) -> bool:
    """Whether the user has stayed to the end of the run. A launcher of our own goes on without us:
    nobody has asked it to stop. Raises LauncherError, AioRpcError."""
    try:
        problem = await interrupts.unless(watch_to_end(connection, followed, view, interrupts))
    except InterruptedByUserError:
        return False
    if problem is not None:
        raise problem
    return True


def leave(console: Terminal, run_id: str, runs: Path, stopping: str) -> None:
    """Say that the run goes on, and what one can do about it."""
    lines = (
        f"Run {run_id} goes on.",
        f"  {hints.command('watch', run_id, runs=runs)}   follows it",
        f"  {stopping}   stops it",
    )
    for line in lines:
        console.print(line, soft_wrap=True)


def _conclude(run: pb.Run, runs: Path, console: Terminal) -> int:
    if run.state == pb.RUN_STATE_COMPLETED:
        evaluated = run.mode == pb.RUN_MODE_EVAL_ONLY
        report.print_report(runs / run.run_id, console, evaluated=evaluated)
        return _OK
    if run.state == pb.RUN_STATE_FAILED:
        return fail(f"run {run.run_id} failed: {run.error}")
    console.print(f"Run {run.run_id} was stopped.")
    return _FAILED
