"""Parquet holds the same tasks as JSON lines do, and other programs read it."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_common.tasks.task_files import TaskFileError, read_tasks
from flotilla_reading.data.entries import Entry
from flotilla_reading.data.row_files import format_tasks, parse_file, read_task_file
from tests.reading.data.made_tasks import make_row, make_rows, to_entries, to_rows

ROWS = [
    make_row("a", version=3, metadata={"deep": [1, {"x": None}]}, offered_tools=["one", "two"]),
    make_row("b", version="3", env_variables={"CURRENT_DATE": "2026-02-14"}, difficulty=2),
    make_row("c", difficulty=2**70, passes_untouched=True, prompt="ünïcode\u2028\x00"),
    {"task_key": "d", "prompt": "x", "env_key": "desk", "env_version": 2, "verifier_code": "x = 1"},
]
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def digests(entries: list[Entry]) -> list[tuple[str, str]]:
    return [(entry.key, entry.digest) for entry in entries]


def read_back(entries: list[Entry]) -> list[Entry]:
    rows = parse_file("x.parquet", format_tasks(entries, "parquet"))
    return to_entries([dict(row.fields) for row in rows])


def test_tasks_come_back_from_parquet_as_they_were() -> None:
    entries = to_entries(ROWS)
    assert len(entries) == 4
    assert digests(read_back(entries)) == digests(entries)
    assert format_tasks(entries, "parquet") == format_tasks(entries, "parquet")


@given(st.lists(st.tuples(VALUES, VALUES), max_size=4))
def test_fields_of_any_kind_come_back(values: list[Any]) -> None:
    rows = [
        make_row(f"task-{n}", metadata=one, created_at=two) for n, (one, two) in enumerate(values)
    ]
    entries = to_entries(rows)
    assert digests(read_back(entries)) == digests(entries)


def test_an_empty_part_is_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "eval.parquet"
    path.write_bytes(format_tasks([], "parquet"))
    assert list(read_task_file(path, may_be_empty=True)) == []
    with pytest.raises(TaskFileError, match="at least one task"):
        list(read_task_file(path))


def test_the_datasets_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(format_tasks(to_entries(ROWS), "parquet"))
    found: Any = datasets.load_dataset(
        "parquet", data_files=str(path), cache_dir=str(tmp_path), split="train"
    )
    assert found[0]["metadata"] == ROWS[0]["metadata"]
    assert (found[1]["key"], found[1]["prompt"]) == ("b", "Do b.")


def test_the_parquet_of_others_is_read_without_its_nulls_and_other_types_are_text(
    tmp_path: Path,
) -> None:
    rows = [
        {**make_row("a"), "metadata": {"paid": Decimal("1.50")}, "version": None},
        {**make_row("b"), "metadata": None, "version": "2"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    first, second = read_task_file(tmp_path / "x.parquet")
    assert json.loads(first.text)["metadata"] == {"paid": "1.50"}
    assert "version" not in json.loads(first.text)
    assert (second.task.env_version, "metadata" in json.loads(second.text)) == ("2", False)


def test_a_broken_parquet_file_is_named_and_no_run_reads_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    whole = format_tasks(to_entries(make_rows({"shop": 3})), "parquet")
    path.write_bytes(whole[:-20])
    with pytest.raises(TaskFileError, match=r"x\.parquet: not parquet: after row 0"):
        list(read_task_file(path))
    path.write_bytes(whole)
    assert len(list(read_task_file(path))) == 3
    with pytest.raises(TaskFileError, match=r"a parquet file, which no run reads; `flotilla data"):
        list(read_tasks(path))


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_json_and_its_lines_hold_each_task_as_it_was(form: Any) -> None:
    entries = to_entries(ROWS)
    rows = list(parse_file(f"x.{form}", format_tasks(entries, form)))
    assert [dict(row.fields) for row in rows] == ROWS
    assert [row.task for row in rows] == [row.task for row in to_rows(ROWS)]
