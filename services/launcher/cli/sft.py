"""`flotilla sft`: demonstrations from a recorded run, and the run that imitates them."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.common.episodes.demonstrations import DemonstrationHead
from services.common.files.durable_files import sha256_of
from services.common.run_folder.journal_file import JournalError
from services.common.spec.spec_loading import load_spec
from services.launcher.cli.command_runner import BAD_SPEC, reports_errors
from services.launcher.cli.run_source import find_run_dir
from services.launcher.cli.terminal import CommandError, Terminal
from services.launcher.cli.train import TrainOptions, train_policy
from services.launcher.security.launcher_address import REMOTE_VARIABLE, address_from_environment
from services.reading.demonstrations.acceptance import AcceptanceRules
from services.reading.demonstrations.run_episodes import (
    NoDemonstrationsError,
    explain,
    make_demonstrations,
)

# Folder of files of demonstrations, in that of all runs.
FOLDER = "demonstrations"


@dataclass(frozen=True, slots=True)
class ImitationRequest:
    """What to imitate: the accepted episodes of a run, by its id or `newest`. In a `warm_start` the
    spec's own steps follow."""

    source: str
    rules: AcceptanceRules
    warm_start: bool = False


@reports_errors(bad_spec=BAD_SPEC)
def imitate_run(
    path: Path,
    runs: Path,
    overrides: Sequence[str],
    request: ImitationRequest,
    options: TrainOptions,
) -> int:
    """Write the accepted episodes of a run to a file, and train from a spec on it, as `train`
    does."""
    if address_from_environment() is not None:
        raise CommandError(
            f"this command reads a run's files: use it on the machine of the launcher that"
            f" {REMOTE_VARIABLE} names, in its folder"
        )
    table = "warm_start" if request.warm_start else "sft"
    wanted = [*([] if request.warm_start else ["--learner.objective=sft"]), *overrides]
    # A mistake in the spec is found before the work.
    spec = load_spec(path, wanted)
    console = Terminal()
    file, head = _write_file(find_run_dir(request.source, runs), runs, request.rules, console)
    console.print(f"{file}: {explain(head)}", soft_wrap=True)
    if per_step := _sequences_per_step(spec, table):
        steps = math.ceil(head.counts["sequences"] / per_step)
        console.print(f"An epoch is at most {steps} steps of {per_step} sequences", soft_wrap=True)
    return train_policy(path, runs, [*wanted, f"--learner.{table}.data={file}"], options)


def _sequences_per_step(spec: Mapping[str, Any], table: str) -> int | None:
    """Return the key of a table of a spec that is not checked yet, if it can be one."""
    found: Any = spec
    for name in ("learner", table, "sequences_per_step"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) and found > 0 else None


def _write_file(
    run_dir: Path, runs: Path, rules: AcceptanceRules, console: Terminal
) -> tuple[Path, DemonstrationHead]:
    """Write the file, with a progress bar on a terminal; it is named after run and content, so that
    one that an earlier run imitates stays as it is. Raises CommandError."""
    # Relative if it can be: machines that are rented get the files below the working directory.
    here, whole = Path.cwd(), runs.absolute() / FOLDER
    folder = whole.relative_to(here) if whole.is_relative_to(here) else whole
    partial = folder / f".{run_dir.name}-{os.getpid()}.npz"
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with bar:
            task = bar.add_task("reading", total=None)
            head = make_demonstrations(
                *(run_dir, partial, rules),
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        file = folder / f"{run_dir.name}-{sha256_of(partial)[:12]}.npz"
        partial.replace(file)
    except (NoDemonstrationsError, JournalError) as error:
        raise CommandError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
    return file, head
