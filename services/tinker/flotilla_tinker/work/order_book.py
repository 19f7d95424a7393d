"""Orders from their acceptance to their delivery: nothing is answered before it is on disk."""

import asyncio
import sqlite3
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_tinker.store import order_rows
from flotilla_tinker.store.order_rows import NewOrder, OrderChanged, OrderRow
from flotilla_tinker.store.store import Store
from flotilla_tinker.types import Accepted, Category, ClientOrder, Failure, Pending, Result
from flotilla_tinker.work.desk_errors import Conflict, GoneError, NotFound, TooLarge, TooMuch
from flotilla_tinker.work.limits import Limits

Outcome = Result | Failure
# A part of the transaction that writes an order or its result.
Write = Callable[[sqlite3.Connection], None]

# Bodies of open orders that stay in memory; those beyond are read from the journal.
_MOST_BODY_BYTES = 64 * 2**20
# A body is compressed on the event loop up to this size: the change of threads costs more.
_SMALL_BODY = 16 * 1024
_RETRY_AFTER_S = 2.0
# The same for a full disk.
_FULL_RETRY_AFTER_S = 30.0


@dataclass(slots=True, eq=False)
class OpenOrder:
    """An accepted order without a result."""

    row: OrderRow
    # Compressed; None if it has to be read from the journal.
    body: bytes | None
    outcome: "asyncio.Future[Outcome]"
    # Why it fails instead of being carried out.
    failure: Failure | None = None
    # How often a peer that worked was lost while this order ran.
    deaths: int = 0
    # Its task, while it is carried out.
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Load:
    """What a tenant has ordered and not got."""

    orders: int = 0
    size: int = 0


def _note_nothing() -> None:
    pass


@dataclass(slots=True)
class OrderBook:
    """All open orders, and access to the results of the others."""

    store: Store
    limits: Limits
    clock: Callable[[], float]
    # By request id.
    open: dict[str, OpenOrder] = field(default_factory=dict[str, OpenOrder])
    # Why no orders are accepted now.
    problem: str | None = None
    _loads: dict[str, _Load] = field(default_factory=dict[str, _Load])
    _body_bytes: int = 0
    _writing: BackgroundTasks = field(default_factory=BackgroundTasks)
    _delivered: list[int] = field(default_factory=list[int])

    async def load(self) -> list[OpenOrder]:
        """Return the open orders of the journal, oldest first."""
        rows = await self.store.run(order_rows.open_orders)
        for row in rows:
            self._add_load(row.tenant, row.size)
        return [self._add(row, None) for row in rows]

    async def submit(
        self, order: ClientOrder, place: str, seq_id: int, write: Write
    ) -> tuple[Accepted, OpenOrder | None]:
        """Write an order, in one transaction with `write`, which may refuse it; return it if it
        is new. An accepted order is answered alike however often it is repeated.

        Raises Conflict, TooLarge and TooMuch."""
        size = len(order.body)
        if size > self.limits.largest_order:
            raise TooLarge(f"an order has {size} bytes, but may have {self.limits.largest_order}")
        if self.problem:
            raise TooMuch(self.problem, _FULL_RETRY_AFTER_S)
        prepare = partial(order_rows.prepare_order, order, uuid.uuid4().hex, place, seq_id)
        new = prepare() if size <= _SMALL_BODY else await asyncio.to_thread(prepare)
        self._take_load(order.tenant, size)
        # A client that goes away now has its order in the journal, or will have.
        return await self._writing.run_shielded(self._submit(new, write))

    async def _submit(self, new: NewOrder, write: Write) -> tuple[Accepted, OpenOrder | None]:
        now = self.clock()

        def add(db: sqlite3.Connection) -> tuple[OrderRow, bool]:
            row, is_new = order_rows.add_order(db, new, now)
            if is_new:
                write(db)
            return row, is_new

        is_new = False
        try:
            row, is_new = await self.store.run(add)
        except OrderChanged as error:
            raise Conflict(str(error)) from None
        finally:
            if not is_new:
                self._release_load(new.order.tenant, len(new.order.body))
        return Accepted(row.request_id, row.facts), self._add(row, new.body) if is_new else None

    async def read_body(self, order: OpenOrder) -> bytes:
        """Return the body of an open order."""
        packed = order.body
        if packed is None:
            packed = await self.store.run(partial(_read_body, order.row.number))
        if order.row.size <= _SMALL_BODY:
            return zlib.decompress(packed)
        return await asyncio.to_thread(zlib.decompress, packed)

    async def finish(
        self,
        order: OpenOrder,
        outcome: Outcome,
        *writes: Write,
        operation: int | None = None,
        note: Callable[[], None] = _note_nothing,
    ) -> None:
        """Write a result, in one transaction with `writes`; then call `note` and wake who waits.

        An order that has a result keeps it: then nothing of this happens."""
        await self._writing.run_shielded(self._finish(order, outcome, writes, operation, note))

    async def _finish(
        self,
        order: OpenOrder,
        outcome: Outcome,
        writes: Sequence[Write],
        operation: int | None,
        note: Callable[[], None],
    ) -> None:
        now = self.clock()

        def write(db: sqlite3.Connection) -> bool:
            number = order.row.number
            if not order_rows.finish_order(db, number, outcome, now, operation):
                return False
            for each in writes:
                each(db)
            return True

        if await self.store.run(write):
            note()
            del self.open[order.row.request_id]
            self._body_bytes -= len(order.body or b"")
            self._release_load(order.row.tenant, order.row.size)
            order.outcome.set_result(outcome)

    async def wait(
        self,
        tenant: str,
        request_id: str,
        timeout_s: float,
        queue_state: Callable[[OpenOrder], str],
    ) -> Result | Failure | Pending:
        """Wait for a result. Raises NotFound, and GoneError when it was dropped."""
        order = self.open.get(request_id)
        if order is None:
            return await self._read_outcome(tenant, request_id)
        if order.row.tenant != tenant:
            raise _not_found(request_id)
        await asyncio.wait((order.outcome,), timeout=timeout_s)
        if not order.outcome.done():
            return Pending(queue_state(order))
        self._delivered.append(order.row.number)
        return order.outcome.result()

    @property
    def is_broken(self) -> bool:
        """Whether the disk refuses: nothing can be answered any more."""
        return self.store.broken.done()

    async def flush(self) -> None:
        """Wait for all that is being written."""
        while self._writing.running:
            await asyncio.wait(self._writing.running)

    async def drop_old(self) -> None:
        """Note what was delivered, and drop results that are kept long enough."""
        now, limits = self.clock(), self.limits
        delivered, self._delivered = self._delivered, []

        def drop(db: sqlite3.Connection) -> None:
            order_rows.mark_delivered(db, delivered, now)
            order_rows.drop_results(
                db, now - limits.delivered_s, now - limits.undelivered_s, limits.most_result_bytes
            )

        await self.store.run(drop)

    async def _read_outcome(self, tenant: str, request_id: str) -> Result | Failure | Pending:
        def read(db: sqlite3.Connection) -> tuple[OrderRow | None, Outcome | None]:
            row = order_rows.find_order(db, request_id)
            return row, row and order_rows.read_outcome(db, row.number)

        row, outcome = await self.store.run(read)
        if row is None or row.tenant != tenant:
            raise _not_found(request_id)
        if row.state == "gone":
            raise GoneError(f"the result of {request_id} was kept long enough and has been dropped")
        if outcome is None:  # accepted this moment
            return Pending("active")
        self._delivered.append(row.number)
        return outcome

    def _add(self, row: OrderRow, body: bytes | None) -> OpenOrder:
        if body and self._body_bytes + len(body) > _MOST_BODY_BYTES:
            body = None
        order = OpenOrder(row, body, asyncio.get_running_loop().create_future())
        self._body_bytes += len(body or b"")
        self.open[row.request_id] = order
        return order

    def _take_load(self, tenant: str, size: int) -> None:
        load, limits = self._loads.get(tenant, _Load()), self.limits
        if load.orders >= limits.most_orders or load.size + size > limits.most_order_bytes:
            raise TooMuch(
                f"{load.orders} orders with {load.size} bytes are open; there may be"
                f" {limits.most_orders} with {limits.most_order_bytes}",
                _RETRY_AFTER_S,
            )
        self._add_load(tenant, size)

    def _add_load(self, tenant: str, size: int) -> None:
        load = self._loads.setdefault(tenant, _Load())
        load.orders += 1
        load.size += size

    def _release_load(self, tenant: str, size: int) -> None:
        load = self._loads[tenant]
        load.orders -= 1
        load.size -= size
        if not load.orders:
            del self._loads[tenant]


def _read_body(number: int, db: sqlite3.Connection) -> bytes:
    return order_rows.read_body(db, number)


def _not_found(request_id: str) -> NotFound:
    return NotFound(f"no request has the id {request_id!r}")


def user_failure(message: str) -> Failure:
    return Failure(message, Category.USER)
