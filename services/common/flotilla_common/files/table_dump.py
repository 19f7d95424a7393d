"""Prints every table of a SQLite file as JSON lines, whatever the format of the file: the ledger or
the journal of another Flotilla can be read with it.

    flotilla dump runs/launcher.sqlite
    flotilla dump runs/RUN_ID/journal.sqlite

A line is {"table": ..., "row": {...}}; bytes are hex."""

import json
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from flotilla_common.rpc.errors import ConfigError


def dump_command(path: Path | str) -> str:
    """Return the command that prints a file's tables."""
    return shlex.join(("flotilla", "dump", str(path)))


def dump_tables(path: Path) -> Iterator[str]:
    """Yield the rows of all tables, one JSON line each. Raises ConfigError for a file that is no
    database."""
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            db.row_factory = sqlite3.Row
            tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (table,) in tables:
                quoted = table.replace('"', '""')
                for row in db.execute(f'SELECT * FROM "{quoted}"'):
                    values = {name: _to_json(row[name]) for name in row.keys()}  # noqa: SIM118
                    yield json.dumps({"table": table, "row": values})
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _to_json(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
