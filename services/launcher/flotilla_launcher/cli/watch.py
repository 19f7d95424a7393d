"""`flotilla watch`, and the hints for a user who leaves a running run."""

import time
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli import command_hints, train_report
from flotilla_launcher.cli.command_runner import (
    FAILED,
    INTERRUPTED,
    OK,
    report_error,
    with_run_source,
)
from flotilla_launcher.cli.follow_run import FollowedRun, watch_until_left, with_successors
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.progress_view import RunConsole, open_view
from flotilla_launcher.cli.run_source import RunSource, find_run
from flotilla_launcher.cli.run_view import ENDED, STATE_NAMES
from flotilla_launcher.cli.terminal import Terminal


def watch_run(run_id: str, runs: Path) -> int:
    """Follow a run to its end, no matter which command started it. Ctrl-C only stops
    watching."""
    console = RunConsole()

    async def follow_and_report(known: RunSource, interrupts: Interrupts) -> int:
        run = await interrupts.unless_interrupted(find_run(known, run_id))
        console.print(f"Run {run.run_id} {STATE_NAMES[run.state]}")
        if run.state not in ENDED:
            followed = FollowedRun(int(time.time()), run.run_id)
            with open_view(console) as view:
                ended = await with_successors(
                    known.open_launcher,
                    lambda connection: watch_until_left(connection, followed, view, interrupts),
                    view.show_line,
                )
            if not ended:
                stop = command_hints.format_command("stop", run.run_id, runs=runs)
                print_detach_hints(console, run.run_id, runs, stop)
                return INTERRUPTED
            run = await known.get_run(run.run_id)
        return _print_conclusion(run, runs, console)

    return with_run_source(runs, follow_and_report)


def print_detach_hints(console: Terminal, run_id: str, runs: Path, stop: str) -> None:
    """Print that the run continues, and the commands to follow or stop it."""
    lines = (
        f"Run {run_id} continues.",
        f"  {command_hints.format_command('watch', run_id, runs=runs)}   follows it",
        f"  {stop}   stops it",
    )
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_conclusion(run: pb.Run, runs: Path, console: Terminal) -> int:
    if run.state == pb.RUN_STATE_COMPLETED:
        evaluated = run.mode == pb.RUN_MODE_EVAL_ONLY
        train_report.print_report(runs / run.run_id, console, evaluated=evaluated)
        return OK
    if run.state == pb.RUN_STATE_FAILED:
        return report_error(f"run {run.run_id} failed: {run.error}")
    console.print(f"Run {run.run_id} was stopped.")
    return FAILED
