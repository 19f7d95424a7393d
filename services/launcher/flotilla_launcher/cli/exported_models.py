"""Models of a run's checkpoints in Hugging Face's format. Those that are served or published are
kept below the run's folder, and exported once."""

import fcntl
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from flotilla_common.process.child_environment import child_environment
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError, open_read_only
from flotilla_launcher import learner_programs
from flotilla_launcher.cli.terminal import CommandError
from flotilla_launcher.cli.train_report import MODEL_FOLDER

# Below a run's folder. Whatever is in it can be made again.
EXPORTS = "exports"
# Of a run's folder, of an exported model, and of a checkpoint.
CHECKPOINTS, SUMS, MANIFEST = "checkpoints", "SHA256SUMS", "manifest.json"
_ADAPTERS = "-adapters"


def export_run(run_dir: Path, step: int | None, out: Path, *, adapters: bool = False) -> None:
    """Write the model of a checkpoint, the newest without a `step`, to a new folder, which is
    there only once it is whole. Raises CommandError."""
    wanted = [] if step is None else ["--step", str(step)]
    wanted += ["--adapters"] if adapters else []
    # Checkpoints belong to the learner, so its own program reads them.
    command = learner_programs.learner_command(
        learner_programs.EXPORT, str(run_dir), "--out", str(out), *wanted
    )
    # What it prints is no part of this command's output.
    done = subprocess.run(
        command, check=False, env=child_environment(ours=True), stdout=subprocess.PIPE
    )
    if done.returncode:
        name = run_dir.name if step is None else f"{run_dir.name}@{step}"
        raise CommandError(f"the model of {name} cannot be exported, see above")


def keep_export(run_dir: Path, step: int | None, *, adapters: bool = False) -> tuple[Path, int]:
    """Return the folder of an exported checkpoint, the newest without a `step`, and its step. It
    is exported unless it is there, as a completed run's is. Raises CommandError."""
    checkpoint, found = _find_checkpoint(run_dir, step)
    final = run_dir / MODEL_FOLDER
    if step is None and not adapters and _is_newer(final / SUMS, checkpoint / MANIFEST):
        return final, found
    out = run_dir / EXPORTS / (checkpoint.name + (_ADAPTERS if adapters else ""))
    with _locked(run_dir / EXPORTS):
        if not out.is_dir():
            export_run(run_dir, found, out, adapters=adapters)
    return out, found


def _is_newer(one: Path, other: Path) -> bool:
    """Return whether a file was written after another: a resumed run has a checkpoint that is newer
    than its model until it has completed again."""
    return one.exists() and other.exists() and one.stat().st_mtime >= other.stat().st_mtime


def _find_checkpoint(run_dir: Path, step: int | None) -> tuple[Path, int]:
    """Return the folder and the step of a kept checkpoint. Raises CommandError."""
    journal = run_dir / JOURNAL_FILE
    if not journal.exists():
        raise CommandError(f"{run_dir} has no checkpoint yet: its learner never began")
    try:
        with open_read_only(journal) as db:
            kept = dict(db.execute("SELECT step, directory FROM checkpoints ORDER BY step"))
    except JournalError as error:
        raise CommandError(str(error)) from error
    if not kept:
        raise CommandError(
            f"{run_dir.name} has no checkpoint yet: learner.checkpoint.every says after which steps"
            " it writes one; `flotilla watch` shows how far it is"
        )
    chosen = max(kept) if step is None else step
    if chosen not in kept:
        steps = ", ".join(map(str, kept))
        raise CommandError(f"{run_dir.name} has no checkpoint of step {chosen}; it has {steps}")
    return run_dir / CHECKPOINTS / Path(kept[chosen]).name, chosen


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold a folder against other commands that would export to it."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
