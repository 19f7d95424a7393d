"""Episodes as Parquet files: with all of their numbers, or as conversations for `datasets`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flotilla_common.domain.attempts import Purpose
from flotilla_common.domain.pass_rates import PASS_REWARD

Row = Mapping[str, Any]
# Rows in memory at once, and the size of a row group in a file.
_ROWS = 64
_TEXT = pa.string()
_CALL = pa.struct(
    [
        ("id", _TEXT),
        ("type", _TEXT),
        ("function", pa.struct([("name", _TEXT), ("arguments", _TEXT)])),
    ]
)
_MESSAGE = pa.struct(
    [
        ("role", _TEXT),
        ("content", _TEXT),
        ("reasoning_content", _TEXT),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", _TEXT),
        ("name", _TEXT),
        # SHA-256 of the pictures that it shows, which the names of their files begin with.
        ("pictures", pa.list_(_TEXT)),
    ]
)
_PICTURE = pa.struct(
    [
        ("sha256", _TEXT),
        ("mime", _TEXT),
        ("grid", pa.list_(pa.int32())),
        ("token_offset", pa.int64()),
        ("size_bytes", pa.int64()),
    ]
)
_SPAN = pa.struct(
    [("author", _TEXT), ("length", pa.int64()), ("policy", _TEXT), ("temperature", pa.float64())]
)
_NUMBERS = pa.list_(pa.float32())
_SEQUENCE = pa.struct(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(_SPAN)),
        ("logprobs", _NUMBERS),
        ("pictures", pa.list_(_PICTURE)),
        ("trainer_logprobs", _NUMBERS),
        ("advantages", _NUMBERS),
        ("entropy", _NUMBERS),
        ("weights", _NUMBERS),
        ("trained", pa.bool_()),
        ("why_not", _TEXT),
    ]
)
_FACTS = pa.schema(
    [
        ("step", pa.int64()),
        ("purpose", _TEXT),
        ("eval_id", _TEXT),
        ("env_key", _TEXT),
        ("task_key", _TEXT),
        ("group_id", _TEXT),
        ("attempt_index", pa.int32()),
        ("attempt_try", pa.int32()),
        ("reward", pa.float64()),
        ("partial_reward", pa.float64()),
        ("passed", pa.bool_()),
        ("judged", pa.bool_()),
        ("stop_reason", _TEXT),
        ("failure", _TEXT),
        ("no_grade", _TEXT),
        ("dropped", _TEXT),
        ("checks_passed", pa.list_(_TEXT)),
        ("checks_failed", pa.list_(_TEXT)),
        ("timestamp", pa.float64()),
    ]
)
# Tools as JSON, which TRL reads: their schemas differ from tool to tool.
_CONVERSATIONS = pa.schema([("messages", pa.list_(_MESSAGE)), ("tools", _TEXT), *_FACTS])
_EVERYTHING = pa.schema(
    [
        *_FACTS,
        ("input_prompt", _TEXT),
        ("output_response", _TEXT),
        ("messages", pa.list_(_MESSAGE)),
        ("tools", _TEXT),
        ("sequences", pa.list_(_SEQUENCE)),
        # As JSON: their keys differ from attempt to attempt.
        *((name, _TEXT) for name in ("named_rewards", "turns", "counts", "facts")),
        *((name, _TEXT) for name in ("detail", "suspicion")),
    ]
)
_CARD = """---
configs:
- config_name: default
  data_files:
{files}
---

# Episodes of run {run_id}

Conversations of tool-use agents, one attempt a row: `messages` with `tool_calls` (arguments as JSON
text) and tool results, the `tools` that the chat template was given (JSON text), and the outcome of
the attempt (`reward`, `passed`, `stop_reason`, checks). `pictures` of a message are the SHA-256 of
what it shows, as the names of files in `pictures/` begin. `train` holds attempts at tasks that the
run trained on, `test` those of its evaluations.

```python
from datasets import load_dataset

episodes = load_dataset("path/of/this/folder", split="train")
passed = episodes.filter(lambda row: row["passed"])
```
"""


def write_parquet(rows: Iterator[Row], out: Path) -> int:
    """Write `episodes.parquet`, with all known facts of each attempt; return the number of rows."""
    return sum(_write_files(rows, _EVERYTHING, lambda row: out / "episodes.parquet").values())


def write_dataset(rows: Iterator[Row], out: Path, run_id: str) -> int:
    """Write a folder that `datasets.load_dataset` reads; return the number of rows."""
    (out / "data").mkdir()
    files = _write_files(rows, _CONVERSATIONS, lambda row: out / "data" / _split_file(row))
    names = sorted(path.name for path in files)
    listed = [f"  - split: {name.split('-')[0]}\n    path: data/{name}" for name in names]
    card = _CARD.format(files="\n".join(listed), run_id=run_id)
    (out / "README.md").write_text(card, encoding="utf-8")
    return sum(files.values())


def read_conversations(path: Path) -> Iterator[Row]:
    """Yield the conversations of a file that either function above has written, with their tools,
    outcome and facts. Raises ValueError."""
    with pq.ParquetFile(path) as file:
        names = [name for name in _CONVERSATIONS.names if name in file.schema_arrow.names]
        for batch in file.iter_batches(_ROWS, columns=names):
            yield from batch.to_pylist()


def _split_file(row: Row) -> str:
    split = "test" if row["purpose"] == Purpose.EVAL else "train"
    return f"{split}-00000-of-00001.parquet"


def _write_files(
    rows: Iterator[Row], schema: pa.Schema, place: Callable[[Row], Path]
) -> dict[Path, int]:
    """Write each row to its file; return the number of rows by file."""
    writers: dict[Path, pq.ParquetWriter] = {}
    waiting: dict[Path, list[Row]] = {}
    counts: dict[Path, int] = {}
    with ExitStack() as stack:
        for row in rows:
            path = place(row)
            if path not in writers:
                writer = pq.ParquetWriter(path, schema, compression="zstd")
                writers[path], waiting[path] = stack.enter_context(writer), []
            waiting[path].append(_to_columns(row, schema))
            counts[path] = counts.get(path, 0) + 1
            if len(waiting[path]) == _ROWS:
                _flush(writers[path], waiting[path], schema)
        for path, left in waiting.items():
            _flush(writers[path], left, schema)
    return counts


def _flush(writer: pq.ParquetWriter, rows: list[Row], schema: pa.Schema) -> None:
    writer.write_table(pa.Table.from_pylist(list(rows), schema=schema))
    rows.clear()


def _to_columns(row: Row, schema: pa.Schema) -> Row:
    # Rows that an earlier flotilla dumped are not judged, and have no named rewards.
    reward, judged = row["reward"], row.get("judged", False)
    values = {
        **row,
        "judged": judged,
        "passed": None if reward is None or judged else reward >= PASS_REWARD,
        "messages": [_to_message(message) for message in row["messages"]],
        "sequences": [_to_sequence(sequence) for sequence in row["sequences"]],
        "named_rewards": json.dumps(row.get("named_rewards", {})),
        **{name: json.dumps(row[name]) for name in ("turns", "counts", "facts")},
    }
    return {name: values[name] for name in schema.names}


def _to_message(message: Row) -> Row:
    """Encode arguments as text: their keys differ from tool to tool, but a column has one type."""
    return {**message, "tool_calls": [_to_call(call) for call in message.get("tool_calls", ())]}


def _to_call(call: Row) -> Row:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": text}}


def _to_sequence(sequence: Row) -> Row:
    names: Sequence[str] = ("author", "length", "policy", "temperature")
    spans = [dict(zip(names, span, strict=True)) for span in sequence["spans"]]
    return {**sequence, "spans": spans}
