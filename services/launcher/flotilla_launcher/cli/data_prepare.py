"""`flotilla data prepare`: makes training and evaluation tasks from a source."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from flotilla_launcher.cli.command_runner import OK
from flotilla_launcher.cli.data_views import print_fates, reports_data_errors
from flotilla_launcher.cli.terminal import Terminal
from flotilla_reading.data.dataset_folder import (
    PARTS,
    Origin,
    check_out,
    count_by_env,
    describe,
    origin_of,
    read_kept_split,
    refuse_inside,
    write_folder,
)
from flotilla_reading.data.entries import FAULTS, DataError, Dropped, Prepared, Reason
from flotilla_reading.data.lints import parse_lints
from flotilla_reading.data.preparation import Wishes, prepare
from flotilla_reading.data.quarantine import parse_rules
from flotilla_reading.data.row_files import FileFormat
from flotilla_reading.data.sources import Fetched, fetch_source, locate_source

# Most different faults that are printed.
_SHOWN = 8
# Between two lines about a download, where there is no terminal.
_PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """Where the data come from, where they go, and in which format."""

    source: str
    data_version: str
    out: Path
    quarantine: Path | None
    keep_split: Path | None
    allow: Sequence[str]
    form: FileFormat


@reports_data_errors
def prepare_data(options: PrepareOptions, wishes: Wishes) -> int:
    """Prepare the data, and print what became of the source's tasks."""
    console = Terminal(soft_wrap=True)
    check_out(options.out)
    refuse_inside(options.source, options.out)
    rules, origin = _read_quarantine(options.quarantine)
    kept = None if options.keep_split is None else read_kept_split(options.keep_split)
    allow = parse_lints(options.allow)
    wishes = replace(wishes, quarantine=rules, kept=kept, allow=allow)
    where = (options.source, options.data_version, wishes.selection.modality)
    source = _fetch(locate_source(*where, os.environ), console)
    prepared = prepare(source.read_rows(wishes.defaults), wishes)
    print_fates(count_by_env(prepared), ("train", "eval"), Reason, console)
    _print_notes(prepared, wishes, console)
    _refuse_nothing(prepared, source.url)
    manifest = describe(prepared, wishes, source.to_dict(), origin)
    write_folder(options.out, prepared, manifest, options.form)
    files = ", ".join(f"{part}.{options.form}" for part in PARTS)
    console.print(f"Wrote {files} and manifest.json to {options.out}")
    return OK


def _fetch(source: str, console: Terminal) -> Fetched:
    """Fetch a source, with a progress bar on a terminal, and now and then a line elsewhere."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}
    due = time.monotonic() + _PROGRESS_S

    def report(name: str, done: int, total: int) -> None:
        nonlocal due
        if name not in tasks:
            tasks[name] = bar.add_task(name)
        bar.update(tasks[name], completed=done, total=total)
        if not console.is_terminal and time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_S
            console.print(f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    with bar:
        return fetch_source(source, report)


def _read_quarantine(path: Path | None) -> tuple[Sequence[Any], Origin | None]:
    if path is None:
        return (), None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"--quarantine: {path}: {error.strerror}") from error
    return parse_rules(data, path), origin_of(path, data)


def _refuse_nothing(prepared: Prepared, source: str) -> None:
    if not prepared.train and not prepared.eval:
        raise DataError(f"no task of {source} is left, so nothing was written")


def _describe(fault: Dropped) -> tuple[Reason, str]:
    """Return reason and detail of a fault, the latter without the key of another task."""
    if fault.reason is Reason.EQUALS_EVAL:
        return fault.reason, "asks the same as a task that is evaluated on"
    return fault.reason, fault.detail


def _print_notes(prepared: Prepared, wishes: Wishes, console: Terminal) -> None:
    """Print the faults of the data, the commonest first, and rules without effect."""
    faults = [each for each in prepared.dropped if each.reason in FAULTS]
    counts = Counter(map(_describe, faults))
    for (reason, detail), count in counts.most_common(_SHOWN):
        first = next(each for each in faults if _describe(each) == (reason, detail))
        named = f"{first.place} ({first.key})" if first.key else first.place
        console.print(f"{reason}: {detail}: {count}, for instance {named}")
    if len(counts) > _SHOWN:
        console.print(f"{len(counts) - _SHOWN} other faults are in manifest.json")
    for rule, matches in zip(wishes.quarantine, prepared.matches, strict=True):
        if not matches:
            console.print(f"quarantine: {rule} matches no task")
