"""The journal of the front door: durable, in few commits, held by one process."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from flotilla_tinker.store import order_rows
from flotilla_tinker.store.order_rows import NewOrder, OrderChanged, OrderRow
from flotilla_tinker.store.schema import STORE_FILE, StoreError
from flotilla_tinker.store.store import Store
from flotilla_tinker.types import Category, Failure, Result
from tests.tinker.work.desk_doubles import sample_order, with_body

FIRST = Result(b"first", "application/json", {"x": "1"})
FAR = 10**12


@asynccontextmanager
async def a_store(folder: Path) -> AsyncGenerator[Store]:
    store = Store(folder)
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


def a_new_order(seq: int = 0, body: bytes = b"body") -> NewOrder:
    order = with_body(sample_order("tiny", seq, [1]), body)
    return order_rows.prepare_order(order, f"request-{seq}-{body!r}", "tiny", seq)


async def add(store: Store, new: NewOrder) -> tuple[OrderRow, bool]:
    return await store.run(lambda db: order_rows.add_order(db, new, 5.0))


async def test_what_was_acknowledged_is_there_after_a_restart(tmp_path: Path) -> None:
    async with a_store(tmp_path) as store:
        row, is_new = await add(store, a_new_order())
        assert is_new
    async with a_store(tmp_path) as store:
        assert await store.run(order_rows.open_orders) == [row]
        body = await store.run(lambda db: order_rows.read_body(db, row.number))
        assert body == a_new_order().body


async def test_many_writes_share_a_commit(tmp_path: Path) -> None:
    statements = list[str]()
    async with a_store(tmp_path) as store:
        await store.run(lambda db: db.set_trace_callback(statements.append))
        await asyncio.gather(*(add(store, a_new_order(seq)) for seq in range(1024)))
        await store.run(lambda db: db.set_trace_callback(None))
        assert len(await store.run(order_rows.open_orders)) == 1024
    assert statements.count("COMMIT") < 24


async def test_a_write_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    def fail(db: sqlite3.Connection) -> None:
        order_rows.add_order(db, a_new_order(1), 5.0)
        raise ZeroDivisionError

    async with a_store(tmp_path) as store:
        written = asyncio.gather(
            add(store, a_new_order(0)), store.run(fail), add(store, a_new_order(2)),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance((await written)[1], ZeroDivisionError)
        assert [row.seq_id for row in await store.run(order_rows.open_orders)] == [0, 2]


async def test_a_result_never_changes(tmp_path: Path) -> None:
    async with a_store(tmp_path) as store:
        row, _ = await add(store, a_new_order())
        number = row.number
        assert await store.run(lambda db: order_rows.finish_order(db, number, FIRST, 6.0))
        other = Failure("late", Category.SERVER)
        assert not await store.run(lambda db: order_rows.finish_order(db, number, other, 7.0))
        assert await store.run(lambda db: order_rows.read_outcome(db, number)) == FIRST


async def test_a_number_stands_for_one_order(tmp_path: Path) -> None:
    async with a_store(tmp_path) as store:
        first, _ = await add(store, a_new_order(3))
        assert await add(store, a_new_order(3)) == (first, False)
        with pytest.raises(OrderChanged, match="order 3 of tiny was a sample with another body"):
            await add(store, a_new_order(3, b"other"))


async def test_results_are_dropped_by_age_and_by_size_and_their_orders_stay(
    tmp_path: Path,
) -> None:
    async with a_store(tmp_path) as store:
        rows = [(await add(store, a_new_order(seq)))[0] for seq in range(5)]

        def finish(db: sqlite3.Connection) -> None:
            for row in rows:
                order_rows.finish_order(db, row.number, FIRST, 100.0 + row.seq_id)
            order_rows.mark_delivered(db, [rows[3].number], 200.0)
            order_rows.mark_delivered(db, [rows[3].number], 900.0)

        await store.run(finish)

        async def kept(delivered: float, done: float, size: int = FAR) -> list[int]:
            await store.run(lambda db: order_rows.drop_results(db, delivered, done, size))
            found = [
                await store.run(lambda db, n=row.number: order_rows.read_outcome(db, n))
                for row in rows
            ]
            return [row.seq_id for row, outcome in zip(rows, found, strict=True) if outcome]

        assert await kept(200.0, 100.0) == [0, 1, 2, 3, 4]
        assert await kept(201.0, 101.0) == [1, 2, 4]
        assert await kept(0.0, 0.0, 2 * len(FIRST.body)) == [2, 4]
        assert await add(store, a_new_order(3)) != (rows[3], True)
        found = await store.run(lambda db: order_rows.find_order(db, rows[3].request_id))
        assert found is not None
        assert found.state == "gone"


async def test_one_process_holds_it(tmp_path: Path) -> None:
    async with a_store(tmp_path):
        with pytest.raises(StoreError, match="another server works on"):
            Store(tmp_path)


def test_a_file_that_is_none_or_of_another_format_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / STORE_FILE)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=r"has format 99, but .* reads and writes format"):
        Store(tmp_path)
    (tmp_path / STORE_FILE).write_text("no database, but long enough to be read as one" * 40)
    with pytest.raises(StoreError, match=r"is no journal|cannot be opened"):
        Store(tmp_path)


async def test_nothing_is_acknowledged_after_the_disk_has_refused(tmp_path: Path) -> None:
    def refuse(db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with a_store(tmp_path) as store:
        with pytest.raises(StoreError, match="disk I/O error"):
            await store.run(refuse)
        with pytest.raises(StoreError, match="disk I/O error"):
            await add(store, a_new_order())
        assert store.broken.done()


def test_what_it_holds_is_for_its_user_only(tmp_path: Path) -> None:
    Store(tmp_path / "new").close()
    assert (tmp_path / "new").stat().st_mode & 0o77 == 0
