"""Conversations of files: JSON lines, JSON, Parquet, and folders of them, such as a `datasets`
folder or that of `flotilla data collect`."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flotilla_common.episodes.conversations import Conversation, RenderEnd
from flotilla_common.process.extras import install_command
from flotilla_reading.demonstrations.conversation_rows import (
    ConversationRowError,
    LeftOutError,
    read_row,
)

# What `flotilla data collect` writes beside tasks and evidence.
_COLLECTED = "demonstrations.jsonl"
_LINES = frozenset({".jsonl", ".ndjson"})
_TABLES = frozenset({".parquet", ".arrow"})
# What `datasets` and `flotilla data` say of their own files.
_ABOUT = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_TRAIN = "train"


class ConversationFileError(Exception):
    """A file has something that is no conversation; the message names file, row and reason."""


class FileConversations:
    """The conversations of a file or folder that have at least `min_reward`, or say nothing of a
    reward. `ignored` keys of rows are not looked at."""

    def __init__(self, path: Path, min_reward: float, ignored: Collection[str] = ()) -> None:
        """Find the files and count their rows. Raises ConversationFileError."""
        self.source = path.name
        self._path = path
        self._min_reward = min_reward
        self._ignored = frozenset(ignored)
        self._files = _find_files(path)
        self.total = sum(_count_rows(file) for file in self._files)
        self._counts: Counter[str] = Counter()
        self._left_out: list[str] = []

    def read(self) -> Iterator[Conversation | None]:
        """Yield for each row its conversation, or None if it is left out. Raises
        ConversationFileError."""
        for file in self._files:
            name = str(file.relative_to(self._path)) if file != self._path else ""
            for place, row in _read_rows(file):
                try:
                    yield self._judge(row, f"{name}: {place}" if name else place)
                except ConversationRowError as error:
                    raise ConversationFileError(f"{file}: {place}: {error}") from error

    def _judge(self, row: Any, place: str) -> Conversation | None:
        self._counts["episodes"] += 1
        try:
            found = read_row(row, self.source, place, self._ignored)
        except LeftOutError as error:
            self._counts["accepted"] += 1
            self._counts[error.fate] += 1
            self._left_out.append(f"{place}: {error}")
            return None
        if found is None or found.reward < self._min_reward:
            self._counts["ungraded" if found is None else "below_min_reward"] += 1
            return None
        self._counts["accepted"] += 1
        return found

    def end(self) -> RenderEnd:
        """Return what became of all rows, once they are read."""
        selection = {"min_reward": self._min_reward, "ignored": sorted(self._ignored)}
        left_out = tuple(self._left_out)
        return RenderEnd(self.source, selection, dict(self._counts), left_out=left_out)


def _find_files(path: Path) -> Sequence[Path]:
    """Return the files of a source: of a folder those of its training split, if it has one.
    Raises ConversationFileError."""
    known = {*_LINES, ".json", *_TABLES}
    if not path.is_dir():
        if path.suffix not in known:
            raise ConversationFileError(
                f"{path} is none of {', '.join(sorted(known))}, by its name: convert it, for"
                " instance to JSON lines"
            )
        return [path]
    if (path / _COLLECTED).is_file():
        return [path / _COLLECTED]
    found = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.suffix in known
        and file.name not in _ABOUT
        # Caches, and a download that has not finished.
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not found:
        raise ConversationFileError(f"{path} has no file of {', '.join(sorted(known))}")
    train = [
        file
        for file in found
        if any(part.startswith(_TRAIN) for part in file.relative_to(path).parts)
    ]
    return train or found


def _count_rows(file: Path) -> int:
    if file.suffix in _TABLES:
        adapter = _load_tables(file)
        try:
            return adapter.count_table_rows(file)
        except adapter.TableError as error:
            raise ConversationFileError(f"{file}: {error}") from error
    if file.suffix not in _LINES:
        return len(_read_json(file))
    try:
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConversationFileError(f"{file}: {error.strerror}") from error


def _read_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each row. Raises ConversationFileError."""
    if file.suffix in _TABLES:
        adapter = _load_tables(file)
        try:
            for number, row in enumerate(adapter.read_table_rows(file), start=1):
                yield f"row {number}", row
        except adapter.TableError as error:
            raise ConversationFileError(f"{file}: {error}") from error
    elif file.suffix in _LINES:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _parse(line, f"{file}: line {number}")
    else:
        yield from ((f"entry {n}", row) for n, row in enumerate(_read_json(file), start=1))


def _read_json(file: Path) -> list[Any]:
    try:
        rows = _parse(file.read_bytes(), str(file))
    except OSError as error:
        raise ConversationFileError(f"{file}: {error.strerror}") from error
    if not isinstance(rows, list):
        raise ConversationFileError(f"{file}: expected an array of conversations")
    return rows


def _parse(text: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConversationFileError(f"{where}: {error}") from error


def _load_tables(file: Path) -> Any:
    try:
        from flotilla_reading.adapters import table_rows
    except ImportError as error:
        raise ConversationFileError(f"{file} needs pyarrow: {install_command('export')}") from error
    return table_rows
