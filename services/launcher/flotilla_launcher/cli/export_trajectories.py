"""`flotilla export-trajectories`: writes the episodes of a run for training elsewhere."""

import sys
from pathlib import Path
from typing import Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flotilla_common.run_folder.journal_file import JournalError
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.cli.command_runner import BAD_SPEC, OK, reports_errors
from flotilla_launcher.cli.run_source import find_run_dir
from flotilla_launcher.cli.terminal import Terminal
from flotilla_reading import trajectory_export
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.trajectory_export import TrajectoryExportError


@reports_errors(bad_spec=BAD_SPEC)
def export_trajectories(
    run_id: str, out: Path, runs: Path, form: Literal["parquet", "datasets"], wanted: AttemptFilter
) -> int:
    """Write the matching episodes of a run, with a progress bar on a terminal."""
    run_dir, console = find_run_dir(run_id, runs), Terminal()
    columns = (TextColumn("exporting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with bar:
            task = bar.add_task("exporting", total=None)
            found = trajectory_export.export_trajectories(
                *(run_dir, out, form, wanted),
                lambda done, total: bar.update(task, completed=done, total=total),
            )
    except (TrajectoryExportError, JournalError, OSError) as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return BAD_SPEC
    text = f"Wrote {found.rows} episodes of {run_dir.name} to {out}"
    if found.pruned:
        text += f"; {found.pruned} more are omitted: their tokens were pruned"
    console.print(text, soft_wrap=True)
    return OK
