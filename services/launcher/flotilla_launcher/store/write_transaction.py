"""Transactions that write."""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def write_transaction(db: sqlite3.Connection) -> Generator[None]:
    """Run the block as one transaction, which waits for other writers first; roll back on any
    exception. The connection commits nothing by itself (`isolation_level=None`)."""
    db.execute("BEGIN IMMEDIATE")
    with db:
        yield
