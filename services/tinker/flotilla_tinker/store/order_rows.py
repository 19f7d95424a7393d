"""Orders and their results in the journal: each function is a part of a transaction."""

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_tinker.types import Category, ClientOrder, Failure, Kind, Result

# Its `seq_id` in the journal, as the client gives none.
UNLOAD_SEQ = -1


class OrderChanged(Exception):
    """The client gave the same number to two different orders."""


@dataclass(frozen=True, slots=True)
class NewOrder:
    """An order as it is written to the journal."""

    order: ClientOrder
    request_id: str
    place: str
    seq_id: int
    digest: bytes
    # Compressed.
    body: bytes


@dataclass(frozen=True, slots=True)
class OrderRow:
    """An order in the journal, without its body."""

    number: int
    request_id: str
    kind: Kind
    tenant: str
    session_id: str
    place: str
    seq_id: int
    # Bytes of the body, uncompressed.
    size: int
    accepted_s: float
    facts: Mapping[str, Any]
    state: str


def prepare_order(order: ClientOrder, request_id: str, place: str, seq_id: int) -> NewOrder:
    """Return an order with its body compressed and its digest."""
    digest = hashlib.sha256(order.kind.encode() + b"\0" + order.body).digest()
    return NewOrder(order, request_id, place, seq_id, digest, zlib.compress(order.body, 1))


def add_order(db: sqlite3.Connection, new: NewOrder, now: float) -> tuple[OrderRow, bool]:
    """Write an order; return it and True, or the earlier, equal one with its number and False.

    Raises OrderChanged if the earlier one differs."""
    order = new.order
    sql = "SELECT * FROM orders WHERE place = ? AND seq_id = ?"
    found = db.execute(sql, (new.place, new.seq_id)).fetchone()
    if found is not None:
        if found["digest"] != new.digest or found["tenant"] != order.tenant:
            raise OrderChanged(
                f"order {new.seq_id} of {new.place} was a {found['kind']} with another body"
            )
        return _order_of(found), False
    facts = json.dumps(dict(order.facts))
    added = db.execute(
        "INSERT INTO orders (request_id, kind, tenant, session_id, place, seq_id, digest,"
        " facts_json, size, accepted_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING *",
        (
            *(new.request_id, order.kind.value, order.tenant, order.session_id, new.place),
            *(new.seq_id, new.digest, facts, len(order.body), now),
        ),
    ).fetchone()
    db.execute("INSERT INTO bodies VALUES (?, ?)", (added["number"], new.body))
    return _order_of(added), True


def open_orders(db: sqlite3.Connection) -> list[OrderRow]:
    """Return all orders without a result, oldest first."""
    rows = db.execute("SELECT * FROM orders WHERE state = 'open' ORDER BY number")
    return [_order_of(row) for row in rows]


def note_refused(db: sqlite3.Connection, model_id: str, seq_id: int) -> None:
    """Note that the number of a model's order was refused."""
    db.execute("INSERT OR IGNORE INTO refused VALUES (?, ?)", (model_id, seq_id))


def refused_numbers(db: sqlite3.Connection, model_id: str) -> list[int]:
    """Return the refused numbers of a model, without those that came again and were accepted."""
    sql = (
        "SELECT seq_id FROM refused WHERE model_id = ? AND NOT EXISTS (SELECT 1 FROM orders WHERE"
        " orders.place = refused.model_id AND orders.seq_id = refused.seq_id) ORDER BY seq_id"
    )
    return [seq_id for (seq_id,) in db.execute(sql, (model_id,))]


def find_order(db: sqlite3.Connection, request_id: str) -> OrderRow | None:
    row = db.execute("SELECT * FROM orders WHERE request_id = ?", (request_id,)).fetchone()
    return None if row is None else _order_of(row)


def read_body(db: sqlite3.Connection, number: int) -> bytes:
    """Return the compressed body of an order that is open or may be repeated."""
    return bytes(db.execute("SELECT body FROM bodies WHERE number = ?", (number,)).fetchone()[0])


def finish_order(
    db: sqlite3.Connection,
    number: int,
    outcome: Result | Failure,
    now: float,
    operation: int | None = None,
) -> bool:
    """Write an order's result unless it has one, which never changes; return True if written.

    The body is kept only if the order was an operation, which may have to be repeated."""
    size = len(outcome.message if isinstance(outcome, Failure) else outcome.body)
    changed = db.execute(
        "UPDATE orders SET state = 'done', done_s = ?, operation = ?, result_size = ?"
        " WHERE number = ? AND state = 'open'",
        (now, operation, size, number),
    )
    if not changed.rowcount:
        return False
    db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?)", (number, *_result_row(outcome)))
    if operation is None:
        db.execute("DELETE FROM bodies WHERE number = ?", (number,))
    return True


def read_outcome(db: sqlite3.Connection, number: int) -> Result | Failure | None:
    row = db.execute("SELECT * FROM results WHERE number = ?", (number,)).fetchone()
    if row is None:
        return None
    if row["category"] is not None:
        return Failure(bytes(row["body"]).decode(), Category(row["category"]))
    return Result(bytes(row["body"]), row["content_type"], json.loads(row["headers_json"]))


def mark_delivered(db: sqlite3.Connection, numbers: Sequence[int], now: float) -> None:
    sql = "UPDATE orders SET delivered_s = coalesce(delivered_s, ?) WHERE number = ?"
    db.executemany(sql, [(now, number) for number in numbers])


def drop_results(
    db: sqlite3.Connection, delivered_before: float, done_before: float, most_bytes: int
) -> None:
    """Drop results that were delivered or done before these times, and the oldest beyond
    `most_bytes`. Their rows stay."""
    for column, before in (("delivered_s", delivered_before), ("done_s", done_before)):
        sql = f"SELECT number FROM orders WHERE state = 'done' AND {column} < ?"
        _drop(db, db.execute(sql, (before,)).fetchall())
    sql = "SELECT coalesce(sum(result_size), 0) FROM orders WHERE state = 'done'"
    too_many = db.execute(sql).fetchone()[0] - most_bytes
    if too_many > 0:
        oldest = "SELECT number, result_size FROM orders WHERE state = 'done' ORDER BY done_s"
        gone = list[tuple[int]]()
        for number, size in db.execute(oldest):
            if too_many <= 0:
                break
            gone.append((number,))
            too_many -= size
        _drop(db, gone)


def _drop(db: sqlite3.Connection, numbers: Sequence[tuple[int]]) -> None:
    db.executemany("UPDATE orders SET state = 'gone' WHERE number = ?", numbers)
    db.executemany("DELETE FROM results WHERE number = ?", numbers)


def find_operation(
    db: sqlite3.Connection, model_id: str, operation: int
) -> tuple[Kind, bytes] | None:
    """Return kind and compressed body of an operation of a model; None if it is not kept."""
    row = db.execute(
        "SELECT kind, body FROM orders JOIN bodies USING (number)"
        " WHERE place = ? AND operation = ?",
        (model_id, operation),
    ).fetchone()
    return None if row is None else (Kind(row[0]), bytes(row[1]))


def kept_bytes(db: sqlite3.Connection, model_id: str) -> int:
    """Return the size of the operations of a model that are kept to be repeated."""
    sql = (
        "SELECT coalesce(sum(length(body)), 0) FROM orders JOIN bodies USING (number)"
        " WHERE place = ? AND operation IS NOT NULL"
    )
    return int(db.execute(sql, (model_id,)).fetchone()[0])


def drop_operations(db: sqlite3.Connection, model_id: str, newest: int) -> None:
    """Drop the bodies of a model's operations up to this one: a saved state has them."""
    db.execute(
        "DELETE FROM bodies WHERE number IN"
        " (SELECT number FROM orders WHERE place = ? AND operation <= ?)",
        (model_id, newest),
    )


def _result_row(outcome: Result | Failure) -> tuple[str | None, str, str, bytes]:
    if isinstance(outcome, Failure):
        return outcome.category.value, "", "{}", outcome.message.encode("utf-8", "replace")
    return None, outcome.content_type, json.dumps(dict(outcome.headers)), outcome.body


def _order_of(row: sqlite3.Row) -> OrderRow:
    return OrderRow(
        number=row["number"],
        request_id=row["request_id"],
        kind=Kind(row["kind"]),
        tenant=row["tenant"],
        session_id=row["session_id"],
        place=row["place"],
        seq_id=row["seq_id"],
        size=row["size"],
        accepted_s=row["accepted_s"],
        facts=json.loads(row["facts_json"]),
        state=row["state"],
    )
