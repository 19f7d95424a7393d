"""`flotilla export-trajectories`: writes the episodes of a run for training elsewhere."""

import json
import subprocess
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.common.process.child_environment import child_environment
from services.common.process.python_command import python_command
from services.launcher.cli.command_runner import OK, reports_errors
from services.launcher.cli.run_source import find_run_dir
from services.launcher.cli.terminal import Terminal


@reports_errors()
def export_trajectories(run_id: str, out: Path, runs: Path, arguments: list[str]) -> int:
    """Write the episodes selected by `arguments` of the learner's program."""
    run_dir = find_run_dir(run_id, runs)
    # Journal and dumps belong to the learner, so its own program reads them.
    command = [
        *python_command("-m", "services.learner.dumps.export_command"),
        str(run_dir),
        f"--out={out}",
        *arguments,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=child_environment(ours=True)
    ) as process:
        result = _follow_progress(process)
    if process.returncode != OK or result is None:
        return process.returncode
    text = f"Wrote {result['rows']} episodes of {run_dir.name} to {out}"
    if result["pruned"]:
        text += f"; {result['pruned']} more are omitted: their tokens were pruned"
    Terminal().print(text, soft_wrap=True)
    return OK


def _follow_progress(process: "subprocess.Popen[str]") -> dict[str, Any] | None:
    """Draw a progress bar on a terminal; return the last line of the program."""
    columns = (TextColumn("exporting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Terminal()
    last = None
    assert process.stdout is not None
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("exporting", total=None)
        for line in process.stdout:
            last = json.loads(line)
            if "of" in last:
                bar.update(task, completed=last["done"], total=last["of"])
    return last
