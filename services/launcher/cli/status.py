"""`flotilla status`: shows all runs, or one run with its services and metrics."""

from dataclasses import dataclass
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.text.printable_text import print_visible
from services.launcher.api import codec
from services.launcher.api.run_pages import MOST_RUNS
from services.launcher.cli.command_runner import OK, with_run_source
from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.launcher_client import LauncherError
from services.launcher.cli.run_source import RunSource, find_run
from services.launcher.cli.status_json import format_status_json
from services.launcher.cli.status_text import make_runs_table, print_run, print_table
from services.launcher.cli.terminal import Terminal
from services.launcher.state import RunState


@dataclass(frozen=True, slots=True)
class RunChoice:
    """Which runs to list: by state, name and time, up to `count` (0: all) before run `after`."""

    states: tuple[str, ...] = ()
    name: str = ""
    since: float = 0.0
    count: int = 100
    after: str = ""

    def make_request(self) -> pb.ListRunsRequest:
        """Make the request for the first page."""
        return pb.ListRunsRequest(
            states=[codec.STATES.encode(RunState(state)) for state in self.states],
            name=self.name,
            since=codec.timestamp_to_pb(self.since or None),
            after_run_id=self.after,
            page_size=min(self.count or MOST_RUNS, MOST_RUNS),
        )


def show_status(run_id: str | None, runs: Path, chosen: RunChoice, *, as_json: bool = False) -> int:
    """Show the chosen runs, or one run; return the exit code."""
    console = Terminal()

    async def show_found(known: RunSource, interrupts: Interrupts) -> int:
        problem = await _ensure_attended(known)
        if problem:
            Terminal(stderr=as_json).print(f"error: {problem}")
        more = 0
        if run_id is None:
            found, more = await interrupts.unless_interrupted(_list_chosen(known, chosen))
        else:
            found = [await interrupts.unless_interrupted(find_run(known, run_id))]
        if as_json:
            print_visible(format_status_json(found, attended=not problem, more=more))
        elif run_id is None:
            print_table(make_runs_table(found), console)
            if more:
                console.print(_describe_more(found[-1].run_id, more), soft_wrap=True)
        else:
            print_run(found[0], known.display_path, console, alone=bool(problem))
        return OK

    return with_run_source(runs, show_found)


async def _list_chosen(known: RunSource, chosen: RunChoice) -> tuple[list[pb.Run], int]:
    """Return the chosen runs, and how many more there are."""
    request, found = chosen.make_request(), list[pb.Run]()
    while True:
        page = await known.list_runs(request)
        found += page.runs
        lacking = chosen.count - len(found) if chosen.count else page.more
        if not page.more or lacking <= 0:
            return found, page.more
        request.after_run_id = found[-1].run_id
        request.page_size = min(lacking, MOST_RUNS)


def _describe_more(last: str, more: int) -> str:
    return (
        f"{more:,} more: --after {last} continues, --count 0 shows all; --state, --name and --since"
        " choose among them"
    )


async def _ensure_attended(known: RunSource) -> str:
    """Ensure that live runs have a launcher; return the problem if that fails, else "". The known
    runs are shown in either case."""
    try:
        await known.ensure_attended()
    except LauncherError as error:
        return str(error)
    return ""
