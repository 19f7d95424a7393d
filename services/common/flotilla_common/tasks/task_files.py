"""Task files: a JSON array, an object with the key "tasks" that holds one, or JSON lines.

Every entry is read as strictly as a task that the env_gateway is sent, and an error names its
place."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flotilla_common.tasks.task_digests import task_digest
from flotilla_common.tasks.task_format import TASK_LIMITS, Task, TaskError, read_task
from flotilla_common.text.parsing import (
    ParseError,
    check_json,
    make_unique_object,
    parse_finite,
    parse_integer,
    refuse_constant,
)

JSON_LINES = (".jsonl", ".ndjson")
# What a parquet file begins with.
PARQUET = b"PAR1"
_SHAPE = (
    'expected a JSON array of tasks, an object with the key "tasks" that holds one, or JSON lines,'
    " and at least one task in it"
)
# Required fields, by the names that a file's author looks for.
_REQUIRED = (("key", "task_key"), ("prompt",), ("env_key", "env_id"))


_SHOWN = 100


class TaskFileError(ValueError):
    """A task file is not usable; the message names the file, the place and the fix."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One entry of a task file: the object as it is there, the same on one line, and the task in
    it. A row without a task has a `fault`, which names the field and the reason."""

    place: str
    fields: Mapping[str, Any]
    text: str
    task: Task | None
    fault: str = ""

    @property
    def key(self) -> str:
        """Key of the task; of a row without one, what stands where its key should, or ""."""
        return self.task.key if self.task else _name_in(self.fields, _REQUIRED[0])

    @property
    def env_key(self) -> str:
        """Environment of the task; of a row without one, what it names as such, or ""."""
        return self.task.env_key if self.task else _name_in(self.fields, _REQUIRED[2])


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A task of a file, and its JSON on one line."""

    task: Task
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        """All that the JSON says, parsed anew."""
        return json.loads(self.text)

    @property
    def digest(self) -> str:
        """SHA-256 of the task, see `task_digest`; computed anew."""
        return task_digest(self.task, self.fields)


def read_tasks(path: Path, *, may_be_empty: bool = False) -> Iterator[ReadTask]:
    """Yield the tasks of a file. Raises TaskFileError for the first that the env_gateway would
    refuse, and for a key that occurs twice."""
    return accept_rows(parse_rows(read_bytes(path), path), path, may_be_empty=may_be_empty)


def accept_rows(
    rows: Iterable[TaskRow], path: Path, *, may_be_empty: bool = False
) -> Iterator[ReadTask]:
    """Yield the tasks of a file's rows. Raises TaskFileError as `read_tasks` does."""
    places: dict[str, str] = {}
    for row in rows:
        if row.task is None:
            named = f" ({row.key[:_SHOWN]})" if row.key else ""
            raise TaskFileError(f"{path}: {row.place}{named}: {row.fault}")
        key = row.task.key
        if key in places:
            raise TaskFileError(
                f"{path}: two tasks have the key {key!r}; make keys unique"
                f" ({places[key]} and {row.place})"
            )
        places[key] = row.place
        yield ReadTask(row.task, row.text)
    if not places and not may_be_empty:
        raise TaskFileError(f"{path}: {_SHAPE}")


def parse_rows(data: bytes, path: Path) -> Iterator[TaskRow]:
    """Yield all entries of a file's content, also those that are no tasks. Raises TaskFileError."""
    for place, value in split_entries(data, path):
        yield read_row(place, value)


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file as objects, without a look at their fields. Raises
    TaskFileError."""
    objects: list[dict[str, Any]] = []
    for place, value in split_entries(read_bytes(path), path):
        if fault := find_fault(value):
            raise TaskFileError(f"{path}: {place}: {fault}")
        objects.append(cast("dict[str, Any]", value))
    return objects


def read_bytes(path: Path) -> bytes:
    """Return the content of a task file. Raises TaskFileError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TaskFileError(f"{path}: there is no such task file") from None
    except OSError as error:
        raise TaskFileError(f"{path}: {error.strerror}") from None


Entry = tuple[str, Any]


class _Fault(str):
    """What is wrong with a value, in its place: a key that is repeated, or a number that is none.
    A parser that stopped there would not know which task it is in."""

    __slots__ = ()


def split_entries(data: bytes, path: Path) -> Iterator[Entry]:
    """Yield the place and the value of each entry of a file's content, whatever it is. `read_row`
    and `find_fault` tell what is wrong with one. Raises TaskFileError."""
    if data.startswith(PARQUET):
        raise TaskFileError(
            f"{path}: a parquet file, which no run reads; `flotilla data prepare {path} --out DIR`"
            " makes JSON lines of it"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path}: not UTF-8 at byte {error.start}") from None
    if path.suffix in JSON_LINES or _is_json_lines(text):
        yield from _split_lines(text, path)
        return
    found = _decode(text, str(path))
    if isinstance(found, dict) and "tasks" not in found and "prompt" in found:
        # JSON lines of one line.
        rows: Any = [found]
    else:
        rows = found.get("tasks") if isinstance(found, dict) else found
    if isinstance(found, _Fault):
        raise TaskFileError(f"{path}: not JSON: {found}")
    if not isinstance(rows, list):
        raise TaskFileError(f"{path}: {_SHAPE}")
    for number, row in enumerate(cast("list[Any]", rows)):
        yield f"task {number}", row


def _split_lines(text: str, path: Path) -> Iterator[Entry]:
    # Not `splitlines`, which also ends lines at characters that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            # A fault ends the reading: a file that was cut off must not pass for a shorter one.
            yield f"line {number}", _decode(line, f"{path}: line {number}")


def _is_json_lines(text: str) -> bool:
    """Return True if the first line is an object, and more follows."""
    first, _, rest = text.lstrip().partition("\n")
    if not first.startswith("{") or not rest.strip():
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def _decode(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise TaskFileError(f"{where}: not JSON: {error}") from None


def read_row(place: str, value: Any) -> TaskRow:
    """Return an entry with its task, or with what is wrong with it."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if fault := find_fault(value):
        return TaskRow(place, fields, "", None, fault)
    text = json.dumps(fields, ensure_ascii=False)
    try:
        return TaskRow(place, fields, text, _read_fields(fields, text))
    except (TaskError, ParseError) as error:
        return TaskRow(place, fields, text, None, str(error))


def _read_fields(fields: Mapping[str, Any], text: str) -> Task:
    """Return the task that `parse_task` finds in a row's text, which is not parsed again. Raises
    TaskError or ParseError."""
    for names in _REQUIRED:
        if all(_is_blank(fields.get(name)) for name in names):
            raise TaskError(f"needs a non-empty string {' or '.join(map(repr, names))}")
    try:
        data = text.encode()
    except UnicodeEncodeError:
        # In a field that only others read; `read_task` names the field of its own.
        read_task(fields)
        raise TaskError("a field holds a lone surrogate, which is not text") from None
    check_json(data, TASK_LIMITS)
    return read_task(fields)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _name_in(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first of these fields that could be a name, as text."""
    values = [fields.get(name) for name in names]
    named = (value for value in values if isinstance(value, str | int) and not _is_blank(value))
    return next(map(str, named), "")


def find_fault(value: Any) -> str:
    """Return why an entry cannot be a row: it is no object, or something in it is not JSON; "" if
    it can."""
    return _find_mark(value) or _fault_of_kind(value)


def _find_mark(value: Any, depth: int = 0) -> str:
    """Return what a parser has marked in a value, or that it is nested too deeply to go on."""
    if isinstance(value, _Fault):
        return str(value)
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if not isinstance(value, list):
        return ""
    if depth == TASK_LIMITS.depth:
        return f"it is nested more than {depth} deep"
    for each in cast("list[Any]", value):
        if fault := _find_mark(each, depth + 1):
            return fault
    return ""


def _fault_of_kind(value: Any) -> str:
    is_object = isinstance(value, dict)
    return "" if is_object else f"expected an object, got {type(value).__name__}"


def _mark(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def parse_or_mark(given: Any) -> Any:
        try:
            return parse(given)
        except ValueError as error:
            return _Fault(error)

    return parse_or_mark


# As strict as the reader of single tasks.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_mark(make_unique_object),
    parse_constant=_mark(refuse_constant),
    parse_int=_mark(parse_integer),
    parse_float=_mark(parse_finite),
)
