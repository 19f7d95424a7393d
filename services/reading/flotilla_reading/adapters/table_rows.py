"""Rows of tables, by pyarrow: Parquet files, and the Arrow files of `datasets`' own folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PARQUET, ARROW = ".parquet", ".arrow"
_BATCH = 256


class TableError(Exception):
    """A file cannot be read as a table; the message gives the reason."""


def count_table_rows(path: Path) -> int:
    """Count the rows of a file. Raises TableError."""
    try:
        if path.suffix == PARQUET:
            return pq.ParquetFile(path).metadata.num_rows
        return sum(batch.num_rows for batch in _read_arrow(path))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TableError(str(error)) from error


def read_table_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, without nulls: a table has every key of an object in every row.
    Raises TableError."""
    try:
        whole = path.suffix == ARROW
        batches = _read_arrow(path) if whole else pq.ParquetFile(path).iter_batches(_BATCH)
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH):
                for row in batch.slice(start, _BATCH).to_pylist():
                    yield {name: _without_nulls(value) for name, value in row.items()}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TableError(str(error)) from error


def _read_arrow(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        yield from pa.ipc.open_stream(source)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
