"""`flotilla data show`, `stats` and `diff`: what is in task files and in prepared folders."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from statistics import median
from typing import ParamSpec

from flotilla_common.tasks.task_files import ReadTask, TaskFileError
from flotilla_common.text.printable_text import first_line
from flotilla_launcher.cli.command_runner import BAD_SPEC, OK, report_error
from flotilla_launcher.cli.terminal import Terminal, make_table, print_table
from flotilla_reading.data.comparison import compare
from flotilla_reading.data.dataset_folder import read_parts
from flotilla_reading.data.entries import DataError

P = ParamSpec("P")

_PROMPT = 60


def reports_data_errors(command: Callable[P, int]) -> Callable[P, int]:
    """Have a command print what is wrong with its data, and return the exit code for it."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except (DataError, TaskFileError) as error:
            return report_error(str(error), BAD_SPEC)

    return run


@reports_data_errors
def show_tasks(path: Path, key: str | None, count: int) -> int:
    """Print one task with all that it says, or a line of each task."""
    console = Terminal(soft_wrap=True)
    tasks = [(part, read) for part, found in read_parts(path).items() for read in found]
    if key is None:
        table = make_table(("key", "environment", "part", "prompt"))
        for part, read in tasks[: count or None]:
            prompt = first_line(read.task.prompt, _PROMPT)
            table.add_row(read.task.key, read.task.env_key, part or "-", prompt)
        print_table(table, console)
        if 0 < count < len(tasks):
            console.print(f"{len(tasks) - count} more; --count 0 shows all")
        return OK
    for part, read in tasks:
        if read.task.key == key:
            _print_task(part, read, console)
            return OK
    raise DataError(f"{path}: none of its {len(tasks)} tasks has the key {key!r}")


def _print_task(part: str, read: ReadTask, console: Terminal) -> None:
    if part:
        console.print(f"part: {part}")
    console.print(f"digest: {read.digest}")
    for name, value in read.fields.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        console.print(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")


@reports_data_errors
def show_statistics(path: Path) -> int:
    """Print the number of tasks of each environment and part, and what they have."""
    table = make_table(
        ("environment", "part", "tasks", "modalities", "versions", "verifier", "prompt")
    )
    for part, tasks in read_parts(path).items():
        envs = sorted({read.task.env_key for read in tasks})
        for env in envs:
            found = [read for read in tasks if read.task.env_key == env]
            table.add_row(env, part or "-", *_describe(found))
        if len(envs) > 1:
            table.add_row("all", part or "-", *_describe(tasks))
    print_table(table, Terminal(soft_wrap=True))
    return OK


def _describe(tasks: Sequence[ReadTask]) -> list[str]:
    versions = {(read.task.env_version, read.task.data_version) for read in tasks}
    characters = median(len(read.task.prompt) for read in tasks)
    return [
        str(len(tasks)),
        ", ".join(sorted({read.task.modality for read in tasks})),
        str(len(versions)),
        str(sum(read.task.verifier is not None for read in tasks)),
        f"{characters:.0f} characters",
    ]


@reports_data_errors
def show_difference(first: Path, second: Path, count: int) -> int:
    """Print the tasks that differ, and how many do not."""
    console = Terminal(soft_wrap=True)
    before, after = read_parts(first), read_parts(second)
    found = compare(before, after)
    for sign, keys in (("+", found.added), ("-", found.removed), ("~", found.changed)):
        _print_keys(sign, {key: "" for key in keys}, count, console)
    moves = {key: f"  {was} → {now}" for key, (was, now) in found.moved.items()}
    _print_keys(">", moves, count, console)
    directions = Counter(found.moved.values())
    moved = ", ".join(f"{was} → {now}: {n}" for (was, now), n in sorted(directions.items()))
    console.print(
        f"{len(found.added)} added, {len(found.removed)} removed, {len(found.changed)} changed,"
        f" {len(found.moved)} moved{f' ({moved})' if moved else ''}, {found.unchanged} unchanged"
    )
    return OK


def _print_keys(sign: str, keys: Mapping[str, str], count: int, console: Terminal) -> None:
    for key in list(keys)[: count or None]:
        console.print(f"{sign} {key}{keys[key]}")
    if 0 < count < len(keys):
        console.print(f"{sign} {len(keys) - count} more; --count 0 shows all")


def print_fates(
    by_env: Mapping[str, Mapping[str, int]],
    parts: Sequence[str],
    reasons: Iterable[str],
    console: Terminal,
) -> None:
    """Print what became of the tasks of each environment: those in each of `parts`, and those left
    out for each of the `reasons` that occur."""
    found = [each for each in reasons if any(each in counts for counts in by_env.values())]
    columns = (*parts, *found)
    table = make_table(("environment", "source", *columns), no_wrap=True)
    total: Counter[str] = Counter()
    for counts in by_env.values():
        total.update(counts)
    for name, counts in (*by_env.items(), ("total", total)):
        cells = [sum(counts.values()), *(counts.get(column, 0) for column in columns)]
        table.add_row(name or "(none)", *map(str, cells))
    print_table(table, console)
