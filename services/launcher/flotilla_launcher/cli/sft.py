"""`flotilla sft`: demonstrations from a recorded run, and the run that imitates them."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flotilla_common.adapters.model_hub import ModelUnavailableError, fetch_files
from flotilla_common.episodes.demonstrations import DemonstrationHead
from flotilla_common.files.durable_files import sha256_of
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.weights.fingerprint import tokenizer_digest
from flotilla_launcher.cli.command_runner import BAD_SPEC, reports_errors
from flotilla_launcher.cli.conversation_rendering import render_conversations
from flotilla_launcher.cli.run_source import NEWEST, find_run_dir
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.cli.train import TrainOptions, train_policy
from flotilla_launcher.security.launcher_address import REMOTE_VARIABLE, address_from_environment
from flotilla_reading.demonstrations.acceptance import AcceptanceRules
from flotilla_reading.demonstrations.conversation_files import (
    ConversationFileError,
    FileConversations,
)
from flotilla_reading.demonstrations.run_conversations import RunConversations
from flotilla_reading.demonstrations.run_episodes import (
    NoDemonstrationsError,
    explain,
    make_demonstrations,
    recorded_tokenizer,
)
from flotilla_reading.trajectory_export import TrajectoryExportError

# Folder of files of demonstrations, in that of all runs.
FOLDER = "demonstrations"
# Of a model, all that its digest is of.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# What is left out is named, up to so many.
_MOST_NAMED = 5
_UNREADABLE = (
    *(NoDemonstrationsError, JournalError),
    *(ConversationFileError, TrajectoryExportError),
)
# Writes a file, tells of its progress, and returns what the file says of itself.
_Write = Callable[[Path, Callable[[int, int], object]], DemonstrationHead]


@dataclass(frozen=True, slots=True)
class ImitationRequest:
    """What to imitate: the accepted episodes of a run, by its id or `newest`, or the conversations
    of a file or folder, whose keys in `ignored` are not looked at. In a `warm_start` the spec's own
    steps follow."""

    source: str
    rules: AcceptanceRules
    ignored: Sequence[str] = ()
    warm_start: bool = False


@reports_errors(bad_spec=BAD_SPEC)
def imitate_run(
    path: Path,
    runs: Path,
    overrides: Sequence[str],
    request: ImitationRequest,
    options: TrainOptions,
) -> int:
    """Write the demonstrations of a source to a file, and train from a spec on it, as `train`
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
    try:
        name, write = _choose_source(request, runs, spec, console)
        file, head = _write_file(name, runs, write, console)
    except _UNREADABLE as error:
        raise CommandError(str(error)) from error
    console.print(f"{file}: {explain(head)}{_name_left_out(head)}", soft_wrap=True)
    if per_step := _sequences_per_step(spec, table):
        steps = math.ceil(head.counts["sequences"] / per_step)
        console.print(f"An epoch is at most {steps} steps of {per_step} sequences", soft_wrap=True)
    return train_policy(path, runs, [*wanted, f"--learner.{table}.data={file}"], options)


def _name_left_out(head: DemonstrationHead) -> str:
    """Return lines that name the first conversations and turns that are not trained."""
    more = len(head.left_out) - _MOST_NAMED
    lines = [*head.left_out[:_MOST_NAMED], *([f"and {more:,} more"] if more > 0 else [])]
    return "".join(f"\n  {line}" for line in lines)


def _sequences_per_step(spec: Mapping[str, Any], table: str) -> int | None:
    """Return the key of a table of a spec that is not checked yet, if it can be one."""
    found: Any = spec
    for name in ("learner", table, "sequences_per_step"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) and found > 0 else None


def _choose_source(
    request: ImitationRequest, runs: Path, spec: Mapping[str, Any], console: Terminal
) -> tuple[str, _Write]:
    """Return the name of a source, and what writes it. Raises CommandError."""
    path, rules = Path(request.source), request.rules
    is_run = request.source == NEWEST or (runs / request.source / JOURNAL_FILE).exists()
    if not is_run and not path.exists() and (path.suffix or len(path.parts) > 1):
        raise CommandError(f"{path} does not exist, and no run has such an id")
    if is_run or not path.exists():
        return _choose_run(find_run_dir(request.source, runs), rules, spec, console)
    if (path / JOURNAL_FILE).exists():
        return _choose_run(path.absolute(), rules, spec, console)
    if rules.best_of is not None:
        raise CommandError(f"--best-of: {path} is no run; choose rows by --min-reward, or yourself")
    found = FileConversations(path, rules.min_reward, request.ignored)
    return path.resolve().stem, lambda out, show: render_conversations(spec, found, out, show)


def _choose_run(
    run_dir: Path, rules: AcceptanceRules, spec: Mapping[str, Any], console: Terminal
) -> tuple[str, _Write]:
    """Return the name of a run, and what writes its episodes: by their ids if the model has its
    tokenizer, else by their messages."""
    own = _tokenizer_of(spec)
    if own is None or own == recorded_tokenizer(run_dir):
        return run_dir.name, lambda out, show: make_demonstrations(run_dir, out, rules, show)
    console.print(
        f"policy.model has another tokenizer or chat template than {run_dir.name}: its messages are"
        " rendered",
        soft_wrap=True,
    )
    found = RunConversations(run_dir, rules)
    return run_dir.name, lambda out, show: render_conversations(spec, found, out, show)


def _tokenizer_of(spec: Mapping[str, Any]) -> str | None:
    """Return the digest of the model's tokenizer, in hex; None if its files cannot be had here: the
    learner compares the digests too. Raises ConfigError."""
    policy = parse_config(PolicyConfig, spec.get("policy", {}), where="the spec", section="policy")
    try:
        folder = fetch_files(policy.model, policy.revision, _TOKENIZER_FILES)
        return tokenizer_digest(folder).hex()
    except (ModelUnavailableError, FileNotFoundError):
        return None


def _write_file(
    name: str, runs: Path, write: _Write, console: Terminal
) -> tuple[Path, DemonstrationHead]:
    """Write the file, with a progress bar on a terminal; it is named after source and content, so
    that one that an earlier run imitates stays as it is. Raises CommandError."""
    # Relative if it can be: machines that are rented get the files below the working directory.
    here, whole = Path.cwd(), runs.absolute() / FOLDER
    folder = whole.relative_to(here) if whole.is_relative_to(here) else whole
    partial = folder / f".{name}-{os.getpid()}.npz"
    partial.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with bar:
            task = bar.add_task("reading", total=None)
            head = write(partial, lambda done, total: bar.update(task, completed=done, total=total))
        if not partial.exists():
            why = f"{explain(head)}{_name_left_out(head)}"
            raise CommandError(f"{name} has nothing to imitate: {why}")
        file = folder / f"{name}-{sha256_of(partial)[:12]}.npz"
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file, head
