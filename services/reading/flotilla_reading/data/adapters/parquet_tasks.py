"""Task files in parquet, by pyarrow: a column for each field, of JSON if its values are objects,
lists or of several kinds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_KINDS = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_INT64 = 2**63


class ParquetError(Exception):
    """The file cannot be read as parquet; the message gives the reason."""


def read_entries(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row of a parquet file, without its nulls. Raises
    ParquetError."""
    number = 0
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        of_json = {field.name for field in file.schema_arrow if _is_json(field.type)}
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", _to_json(row, of_json)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ParquetError(f"after row {number}: {error}") from error


def _is_json(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.JsonType)


def _to_json(row: Mapping[str, Any], of_json: set[str]) -> dict[str, Any]:
    found = {
        name: json.loads(value) if name in of_json else value
        for name, value in row.items()
        if value is not None
    }
    # Dates, decimals and the like become text, as nothing else in JSON is like them.
    return json.loads(json.dumps(found, default=str))


def format_rows(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the parquet file of task objects. The same rows make the same bytes."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    fields: list[pa.Field] = []
    columns: list[pa.Array] = []
    for name in names:
        values = [row.get(name) for row in rows]
        kind = _kind_of(values)
        if kind is None:
            kind = pa.json_()
            values = [None if value is None else json.dumps(value) for value in values]
        fields.append(pa.field(name, kind))
        columns.append(pa.array(values, kind))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), sink)
    return sink.getvalue().to_pybytes()


def _kind_of(values: Sequence[Any]) -> pa.DataType | None:
    """Return the type of a column of plain values of one kind; None for any other."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) != 1 or any(isinstance(v, int) and not -_INT64 <= v < _INT64 for v in values):
        return None
    return _KINDS.get(kinds.pop())
