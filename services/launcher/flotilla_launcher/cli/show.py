"""`flotilla show`: prints the agent's attempts, turn by turn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flotilla_common.adapters.token_text import Decode, NoTokenizerError, load_decoder
from flotilla_common.files.json_files import read_json_object
from flotilla_common.text.parsing import as_object
from flotilla_launcher.cli.attempt_text import draw_attempt
from flotilla_launcher.cli.command_runner import OK, reports_errors
from flotilla_launcher.cli.run_source import find_run_dir
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.store.run_files import JOURNAL, SPEC_FILE
from flotilla_reading.attempt_filter import AttemptFilter
from flotilla_reading.attempts import NothingFoundError, query_attempts, query_inactive_tasks


@reports_errors()
def show_attempts(
    run_id: str,
    runs: Path,
    chosen: AttemptFilter,
    count: int,
    policy: str | None,
    *,
    whole: bool = False,
) -> int:
    """Print up to `count` decoded attempts of a run from the learner's journal.

    `policy` is the model folder or hub id with the tokenizer; None selects the run's own. `whole`
    prints in full the tool results that were truncated for the policy.
    """
    run_dir = find_run_dir(run_id, runs)
    try:
        *attempts, last = query_attempts(run_dir / JOURNAL, chosen, count)
    except NothingFoundError as error:
        raise CommandError(str(error)) from error
    try:
        decode = _load_run_decoder(run_dir, policy)
    except NoTokenizerError as error:
        message = f"{error}; pass a model folder with a tokenizer as --policy"
        raise CommandError(message) from error
    _print_attempts(attempts, last["matched"], decode, whole)
    return OK


@reports_errors()
def show_tasks(run_id: str, runs: Path) -> int:
    """Print the tasks that a run has parked or quarantined, and why."""
    try:
        tasks = query_inactive_tasks(find_run_dir(run_id, runs) / JOURNAL)
    except NothingFoundError as error:
        raise CommandError(str(error)) from error
    console = Terminal()
    for task in tasks:
        head = f"{task['standing']:<12} {task['env_key']}  {task['task_key']}"
        console.print(f"{head}  {task['reason']}", soft_wrap=True)
    text = f"{len(tasks)} tasks are parked or quarantined"
    console.print(text, style="dim")
    return OK


def _load_run_decoder(run_dir: Path, policy: str | None) -> Decode:
    if policy is not None:
        return load_decoder(policy)
    path = run_dir / SPEC_FILE
    if not path.exists():
        raise NoTokenizerError(f"{path} does not exist, so the run's policy is unknown")
    try:
        own = as_object(read_json_object(path).get("policy"))
    except ValueError as error:
        raise NoTokenizerError(f"the run's policy is unknown: {error}") from error
    if not isinstance(own.get("model"), str):
        raise NoTokenizerError(f"{path} names no policy.model, so the run's policy is unknown")
    return load_decoder(own["model"], own.get("revision"))


def _print_attempts(
    attempts: Sequence[dict[str, Any]], matched: int, decode: Decode, whole: bool
) -> None:
    console = Terminal()
    for attempt in attempts:
        console.print(draw_attempt(attempt, decode, whole=whole), soft_wrap=True)
    text = f"{len(attempts)} of {matched} attempts"
    text += "; -n shows more" if len(attempts) < matched else ""
    console.print(text, style="dim")
