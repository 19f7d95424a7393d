"""`flotilla runs`, an experiment log: lists, filters, sorts and compares runs. Its plain list is
that of `flotilla status`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.spec.spec_values import ABSENT, compare_specs, format_value
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.api import codec
from flotilla_launcher.api.run_pages import MOST_RUNS
from flotilla_launcher.cli.command_runner import OK, with_run_source
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.run_columns import (
    RunDetails,
    describe_unknown,
    format_cell,
    parse_conditions,
    parse_details,
    sort_runs,
    value_to_json,
)
from flotilla_launcher.cli.run_source import RunSource, find_run
from flotilla_launcher.cli.run_view import STATE_NAMES
from flotilla_launcher.cli.status import report_unattended
from flotilla_launcher.cli.status_json import format_status_json
from flotilla_launcher.cli.status_text import make_runs_table
from flotilla_launcher.cli.terminal import Terminal, make_table, print_table
from flotilla_launcher.state import RunState
from flotilla_reading.report.short_list import SHORT_LIST

# Runs of a launcher elsewhere that are read concurrently.
_CONCURRENT = 64


@dataclass(frozen=True, slots=True)
class RunChoice:
    """Which runs to list: by state, name, time and spec, up to `count` (0: all) before run
    `after`, newest first or sorted by a column."""

    states: tuple[str, ...] = ()
    name: str = ""
    since: float = 0.0
    count: int = 100
    after: str = ""
    where: tuple[str, ...] = ()
    sort: str = ""

    def make_request(self) -> pb.ListRunsRequest:
        """Make the request for the first page."""
        return pb.ListRunsRequest(
            states=[codec.STATES.encode(RunState(state)) for state in self.states],
            name=self.name,
            since=codec.timestamp_to_pb(self.since or None),
            after_run_id=self.after,
            page_size=min(self.count or MOST_RUNS, MOST_RUNS),
        )


def list_runs(
    runs: Path, chosen: RunChoice, columns: Sequence[str] = (), *, as_json: bool = False
) -> int:
    """Print the chosen runs, a line each, with these columns; return the exit code."""

    async def show_found(known: RunSource, interrupts: Interrupts) -> int:
        problem = await report_unattended(known, as_json=as_json)
        found, more = await interrupts.unless_interrupted(_choose(known, chosen, columns))
        if as_json:
            shown = [each.run for each in found]
            cells = [each.cells_to_json(columns) for each in found] if columns else ()
            print_visible(format_status_json(shown, attended=not problem, more=more, cells=cells))
            return OK
        console = Terminal()
        cells = {name: [format_cell(each.find_cell(name)) for each in found] for name in columns}
        print_table(make_runs_table([each.run for each in found], cells), console)
        for hint in describe_unknown(found, columns):
            console.print(hint, soft_wrap=True)
        if more:
            console.print(_describe_more(chosen, found[-1].run.run_id, more), soft_wrap=True)
        return OK

    return with_run_source(runs, show_found)


def compare_runs(
    names: Sequence[str], runs: Path, columns: Sequence[str] = (), *, as_json: bool = False
) -> int:
    """Print the keys by which the specs of runs differ, and their newest metrics, side by side;
    return the exit code."""

    async def show_compared(known: RunSource, interrupts: Interrupts) -> int:
        problem = await report_unattended(known, as_json=as_json)
        found = [
            parse_details(await interrupts.unless_interrupted(find_run(known, name)))
            for name in names
        ]
        differing = compare_specs([each.spec for each in found])
        if as_json:
            shown = [each.run for each in found]
            cells = [each.cells_to_json(columns or SHORT_LIST) for each in found]
            keys = {key: list(map(value_to_json, values)) for key, values in differing.items()}
            print_visible(
                format_status_json(shown, attended=not problem, cells=cells, differing=keys)
            )
        else:
            _print_comparison(found, differing, columns)
        return OK

    return with_run_source(runs, show_compared)


def _print_comparison(
    found: Sequence[RunDetails], differing: Mapping[str, Sequence[Any]], columns: Sequence[str]
) -> None:
    console, ids = Terminal(), [each.run.run_id for each in found]
    table = make_table(["SPEC", *ids], no_wrap=True)
    for key, values in differing.items():
        table.add_row(key, *(format_value(value, "-") for value in values))
    if differing:
        print_table(table, console)
    else:
        console.print("the specs are equal")
    console.print()
    table = make_table(["NEWEST", *ids], no_wrap=True)
    table.add_row("state", *(STATE_NAMES[each.run.state] for each in found))
    table.add_row("step", *(f"{each.run.step}/{each.run.total_steps}" for each in found))
    for name in columns or SHORT_LIST:
        cells = [each.find_cell(name) for each in found]
        if columns or any(cell is not ABSENT for cell in cells):
            table.add_row(name, *map(format_cell, cells))
    print_table(table, console)
    for hint in describe_unknown(found, columns):
        console.print(hint, soft_wrap=True)


async def _choose(
    known: RunSource, chosen: RunChoice, columns: Sequence[str]
) -> tuple[list[RunDetails], int]:
    """Return the chosen runs, and how many more there are. Only details decide on conditions and
    order: with either, all runs are read."""
    fulfils = parse_conditions(chosen.where)
    if not chosen.where and not chosen.sort:
        found, more = await _list_pages(known, chosen)
        # A list has no specs, and few metrics.
        whole = await _read_details(known, found) if columns else None
        return whole or [RunDetails(run, {}) for run in found], more
    found, _ = await _list_pages(known, replace(chosen, count=0))
    fitting = list(filter(fulfils, await _read_details(known, found)))
    ordered = sort_runs(fitting, chosen.sort) if chosen.sort else fitting
    shown = ordered[: chosen.count or None]
    return shown, len(ordered) - len(shown)


async def _read_details(known: RunSource, found: Sequence[pb.Run]) -> list[RunDetails]:
    details: list[RunDetails] = []
    for begin in range(0, len(found), _CONCURRENT):
        batch = found[begin : begin + _CONCURRENT]
        async with running_tasks(*(known.get_run(run.run_id) for run in batch)) as tasks:
            details += [parse_details(await task) for task in tasks]
    return details


async def _list_pages(known: RunSource, chosen: RunChoice) -> tuple[list[pb.Run], int]:
    """Return the runs by state, name and time, and how many more there are."""
    request, found = chosen.make_request(), list[pb.Run]()
    while True:
        page = await known.list_runs(request)
        found += page.runs
        lacking = chosen.count - len(found) if chosen.count else page.more
        if not page.more or lacking <= 0:
            return found, page.more
        request.after_run_id = found[-1].run_id
        request.page_size = min(lacking, MOST_RUNS)


def _describe_more(chosen: RunChoice, last: str, more: int) -> str:
    onwards = "" if chosen.sort else f"--after {last} continues, "
    return (
        f"{more:,} more: {onwards}--count 0 shows all; --state, --name and --since choose among"
        " them"
    )
