"""`flotilla status` of one run, with its services and metrics; `runs.py` lists them."""

from pathlib import Path

from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.cli.command_runner import OK, with_run_source
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.launcher_client import LauncherError
from flotilla_launcher.cli.run_source import RunSource, find_run
from flotilla_launcher.cli.status_json import format_status_json
from flotilla_launcher.cli.status_text import print_run
from flotilla_launcher.cli.terminal import Terminal


def show_status(run_id: str, runs: Path, *, as_json: bool = False) -> int:
    """Show one run; return the exit code."""

    async def show_found(known: RunSource, interrupts: Interrupts) -> int:
        problem = await report_unattended(known, as_json=as_json)
        found = await interrupts.unless_interrupted(find_run(known, run_id))
        if as_json:
            print_visible(format_status_json([found], attended=not problem))
        else:
            print_run(found, known.display_path, Terminal(), alone=bool(problem))
        return OK

    return with_run_source(runs, show_found)


async def report_unattended(known: RunSource, *, as_json: bool) -> str:
    """Ensure that live runs have a launcher; print and return the problem if that fails, else "".
    The known runs are shown in either case."""
    try:
        await known.ensure_attended()
    except LauncherError as error:
        Terminal(stderr=as_json).print(f"error: {error}")
        return str(error)
    return ""
