"""`flotilla status`: shows all runs, or one run with its services and metrics."""

from pathlib import Path

from services.common.printable_text import print_visible
from services.launcher.cli.command_runner import OK, with_run_source
from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.launcher_client import LauncherError
from services.launcher.cli.run_source import RunSource, find_run
from services.launcher.cli.status_json import format_status_json
from services.launcher.cli.status_text import make_runs_table, print_run, print_table
from services.launcher.cli.terminal import Terminal


def show_status(run_id: str | None, runs: Path, *, as_json: bool = False) -> int:
    """Show all runs, or one run; return the exit code."""
    console = Terminal()

    async def show_found(known: RunSource, interrupts: Interrupts) -> int:
        problem = await _ensure_attended(known)
        if problem:
            Terminal(stderr=as_json).print(f"error: {problem}")
        if run_id is None:
            found = await interrupts.unless_interrupted(known.list_runs())
        else:
            found = [await interrupts.unless_interrupted(find_run(known, run_id))]
        if as_json:
            print_visible(format_status_json(found, attended=not problem))
        elif run_id is None:
            print_table(make_runs_table(found), console)
        else:
            print_run(found[0], known.display_path, console, alone=bool(problem))
        return OK

    return with_run_source(runs, show_found)


async def _ensure_attended(known: RunSource) -> str:
    """Ensure that live runs have a launcher; return the problem if that fails, else "". The known
    runs are shown in either case."""
    try:
        await known.ensure_attended()
    except LauncherError as error:
        return str(error)
    return ""
