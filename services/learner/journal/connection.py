"""Connections to the journal's file, and their errors."""

import sqlite3
from pathlib import Path


class JournalError(Exception):
    """The journal could not be opened or written; later writes are not acknowledged."""


class StaleEpochError(JournalError):
    """Another learner has begun a newer epoch of the run: this one must stop."""


def connect_journal(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a connection whose commits are on disk when they return."""
    uri = f"{path.absolute().as_uri()}{'?mode=ro' if read_only else ''}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
    if not read_only:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    return connection
