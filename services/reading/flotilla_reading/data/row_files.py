"""Rows of task files in every format and convention that is read, and the files that are written:
JSON, JSON lines and parquet."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from flotilla_common.process.extras import install_command
from flotilla_common.tasks.task_files import (
    PARQUET,
    ReadTask,
    TaskFileError,
    TaskRow,
    accept_rows,
    read_bytes,
    split_entries,
)
from flotilla_reading.data.conventions import NO_DEFAULTS, Defaults, choose_convention, to_row
from flotilla_reading.data.entries import DataError, Entry

FileFormat = Literal["jsonl", "json", "parquet"]


def parse_file(name: str, data: bytes, defaults: Defaults = NO_DEFAULTS) -> Iterator[TaskRow]:
    """Yield the rows of a file, in the convention of its first one. Raises DataError or
    TaskFileError."""
    entries = _parquet_entries(name, data) if data.startswith(PARQUET) else None
    entries = split_entries(data, Path(name)) if entries is None else entries
    first = next(entries, None)
    if first is None:
        return
    convention = choose_convention(first[1])
    for place, value in chain([first], entries):
        yield to_row(convention, place, value, defaults)


def read_task_file(path: Path, *, may_be_empty: bool = False) -> Iterator[ReadTask]:
    """Yield the tasks of a file. Raises DataError or TaskFileError, also for the first row that is
    no task."""
    rows = parse_file(str(path), read_bytes(path))
    return accept_rows(rows, path, may_be_empty=may_be_empty)


def _parquet_entries(name: str, data: bytes) -> Iterator[tuple[str, Any]]:
    adapter = _load_parquet(name)
    try:
        yield from adapter.read_entries(data)
    except adapter.ParquetError as error:
        raise TaskFileError(f"{name}: not parquet: {error}") from error


def _load_parquet(what: str) -> Any:
    try:
        from flotilla_reading.data.adapters import parquet_tasks
    except ImportError as error:
        raise DataError(f"{what} needs pyarrow: {install_command('export')}") from error
    return parquet_tasks


def format_tasks(entries: Sequence[Entry], form: FileFormat) -> bytes:
    """Return the file of these tasks; parquet has a column for each field. Raises DataError."""
    if form == "parquet":
        return _load_parquet("--format parquet").format_rows([entry.fields for entry in entries])
    lines = [entry.text for entry in entries]
    if form == "jsonl":
        return "".join(f"{line}\n" for line in lines).encode()
    return ('{"tasks": [\n' + ",\n".join(lines) + "\n]}\n").encode()
