"""Rows of task files for tests of data."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flotilla_common.tasks.task_files import TaskRow, parse_rows
from flotilla_reading.data.entries import Entry, Prepared, to_entry
from flotilla_reading.data.split import KeptSplit

Row = dict[str, Any]
# Number of an environment's tasks, by environment.
SIZES = st.dictionaries(
    st.sampled_from(["booking", "desk", "mail", "shop", "tracker"]), st.integers(0, 60), min_size=1
)


def make_row(key: str, env: str = "shop", **fields: Any) -> Row:
    return {"key": key, "prompt": f"Do {key}.", "env_id": env, **fields}


def make_rows(sizes: Mapping[str, int]) -> list[Row]:
    return [make_row(f"{env}-{n}", env) for env, size in sizes.items() for n in range(size)]


def to_rows(rows: Iterable[Row]) -> list[TaskRow]:
    return list(parse_rows(json.dumps(list(rows)).encode(), Path("tasks.json")))


def to_entries(rows: Iterable[Row]) -> list[Entry]:
    return [to_entry(row, row.task) for row in to_rows(rows) if row.task is not None]


def keys_of(entries: Iterable[Entry]) -> set[str]:
    return {entry.key for entry in entries}


def keep(prepared: Prepared) -> KeptSplit:
    parts = [("train", entry) for entry in prepared.train]
    parts += [("eval", entry) for entry in prepared.eval]
    return KeptSplit(
        *("old", "12"),
        {entry.key: part for part, entry in parts},
        {entry.question: part for part, entry in parts},
    )
