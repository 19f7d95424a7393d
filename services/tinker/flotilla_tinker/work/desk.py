"""What the front door does for its clients: the one class that its HTTP side calls.

An order is in the journal before it is acknowledged, and its result before it is answered."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flotilla_common.aio.concurrency import cancel_tasks, running_tasks
from flotilla_common.telemetry.log import get_logger
from flotilla_tinker.ports import OrderWire, SamplingPeer, TrainingPeer
from flotilla_tinker.store import order_rows, record_rows
from flotilla_tinker.store.record_rows import ModelRow, SamplerRow
from flotilla_tinker.store.schema import StoreError
from flotilla_tinker.store.store import Store
from flotilla_tinker.types import (
    Accepted,
    BaseFacts,
    CheckpointRecord,
    ClientOrder,
    EngineFacts,
    Failure,
    Kind,
    ModelRecord,
    Pending,
    Result,
    SamplerRecord,
)
from flotilla_tinker.work.desk_errors import Away, GoneError, NotFound
from flotilla_tinker.work.engine_samplers import EngineSamplers
from flotilla_tinker.work.limits import DEFAULT_LIMITS, Limits
from flotilla_tinker.work.live_model import LiveModel
from flotilla_tinker.work.model_holding import ModelHolding
from flotilla_tinker.work.model_intake import ModelIntake
from flotilla_tinker.work.model_line import ModelLine
from flotilla_tinker.work.model_saves import ModelSaves
from flotilla_tinker.work.order_book import OpenOrder, OrderBook, user_failure
from flotilla_tinker.work.sampler_intake import SamplerIntake
from flotilla_tinker.work.sampling_carrier import SamplingCarrier, internal_failure
from flotilla_tinker.work.session_book import SessionBook
from flotilla_tinker.work.session_endings import SessionEndings
from flotilla_tinker.work.training_carrier import TrainingCarrier
from flotilla_tinker.work.vault import Vault

# How long a client waits for facts about a peer that is away.
_FACTS_S = 5.0
_LOOK_S = 1.0
_log = get_logger(__name__)


class Desk:
    """Sessions, orders, samplers and checkpoints of all clients. Use `open_desk`.

    All calls raise DeskError."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        training: TrainingPeer,
        sampling: SamplingPeer,
        wire: OrderWire,
        clock: Callable[[], float],
        ticks: Callable[[], float],
    ) -> None:
        self.store, self._limits, self._ticks = store, limits, ticks
        self._samplers = samplers = dict[str, SamplerRow]()
        self._book = book = OrderBook(store, limits, clock)
        self._sessions = SessionBook(store, clock, ticks)
        self._vault = vault = Vault(store, limits, clock)
        self._holding = ModelHolding(training, store, vault, wire, limits)
        self._engine = EngineSamplers(sampling, vault)
        saves = ModelSaves(training, vault, samplers, self._engine, wire, clock)
        self._training = TrainingCarrier(book, self._holding, saves, vault, wire)
        self._sampling = SamplingCarrier(book, self._engine, samplers, wire)
        self._model_intake = ModelIntake(book, self._training, vault, wire)
        self._sampler_intake = SamplerIntake(book, samplers, vault, wire)
        self._endings = SessionEndings(
            book,
            self._sessions,
            self._training,
            self._sampling,
            self._holding,
            self._engine,
            vault,
            samplers,
        )

    async def facts(self) -> tuple[BaseFacts, EngineFacts]:
        """Return what is trained and sampled here."""
        trainer, engine = self._holding.watch, self._engine.watch
        if trainer.last_facts and engine.last_facts:
            return trainer.last_facts, engine.last_facts
        with suppress(TimeoutError):
            async with asyncio.timeout(_FACTS_S):
                return await trainer.facts(), await engine.facts()
        away = "trainer" if trainer.last_facts is None else "sampling engine"
        raise Away(f"the {away} is starting: try again")

    async def open_session(self, tenant: str, facts: Mapping[str, Any]) -> str:
        return await self._sessions.open_session(tenant, facts)

    async def heartbeat(self, tenant: str, session_id: str) -> None:
        await self._sessions.touch(tenant, session_id)

    async def finish_session(self, tenant: str, session_id: str) -> None:
        """End a session; repeatable."""
        try:
            await self._sessions.touch(tenant, session_id)
        except GoneError:
            return
        await self._endings.end(session_id, "the client has finished it", keep=False)

    async def submit(self, order: ClientOrder) -> Accepted:
        """Accept an order; it is on disk when this returns."""
        with _refused_by_disk():
            return await self._submit(order)

    async def _submit(self, order: ClientOrder) -> Accepted:
        if order.kind is Kind.SAMPLE:
            return await self._submit_sample(order)
        await self._sessions.touch(order.tenant, order.session_id)
        creates = order.kind is Kind.CREATE_MODEL or (
            order.kind is Kind.LOAD_WEIGHTS and (order.seq_id == 0 or not order.model_id)
        )
        facts = await self.facts() if creates else None
        if facts is not None:
            await self._make_room(order.tenant, facts[0])
        accepted, opened = await self._model_intake.submit(order, facts)
        if opened is not None and not await self._is_late(opened):
            self._training.add(opened)
        return accepted

    async def wait(
        self, tenant: str, request_id: str, timeout_s: float
    ) -> Result | Failure | Pending:
        """Return an order's result, or that it has none after this time."""
        with _refused_by_disk():
            return await self._book.wait(tenant, request_id, timeout_s, self._queue_state)

    async def pass_over(self, tenant: str, model_id: str, seq_id: int) -> None:
        """Have later orders of a model not wait for one that was refused, whose number the client
        does not give again."""
        with _refused_by_disk():
            await self._training.pass_over(tenant, model_id, seq_id)

    async def cancel(self, tenant: str, request_id: str) -> None:
        """End a sample that nobody waits for; other orders go on."""
        order = self._book.open.get(request_id)
        if order is None or order.row.tenant != tenant or order.row.kind is not Kind.SAMPLE:
            return
        await self._sampling.give_up(order, user_failure("the client has cancelled it"))

    async def open_sampling_session(
        self,
        tenant: str,
        session_id: str,
        seq_id: int,
        *,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        await self._sessions.touch(tenant, session_id)
        engine_model = (await self.facts())[1].model
        return await self._sampler_intake.open_session(
            tenant, session_id, seq_id, engine_model, base_model, model_path
        )

    async def describe_sampler(self, tenant: str, sampler_id: str) -> SamplerRecord:
        return self._sampler_intake.find(tenant, sampler_id)

    async def describe_model(self, tenant: str, model_id: str) -> ModelRecord:
        row = await self.store.run(lambda db: record_rows.find_model(db, model_id))
        if row is None or row.record.tenant != tenant:
            raise NotFound(f"there is no model {model_id!r}")
        return row.record

    async def list_models(self, tenant: str) -> Sequence[ModelRecord]:
        rows = await self.store.run(lambda db: record_rows.models_of(db, tenant))
        return [row.record for row in rows]

    async def list_checkpoints(
        self, tenant: str, model_id: str | None
    ) -> Sequence[CheckpointRecord]:
        records = (row.record for row in self._vault.checkpoints.values())
        mine = (record for record in records if record.tenant == tenant)
        return [record for record in mine if model_id in (None, record.model_id)]

    async def describe_checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        return self._vault.find_checkpoint(tenant, path).record

    async def delete_checkpoint(self, tenant: str, path: str) -> None:
        await self._delete_checkpoint(self._vault.find_checkpoint(tenant, path).record.path)

    async def set_ttl(self, tenant: str, path: str, seconds: float | None) -> None:
        """Have a checkpoint expire, or with None not."""
        await self._vault.set_ttl(self._vault.find_checkpoint(tenant, path), seconds)

    async def archive(self, tenant: str, path: str) -> Path:
        """Return a tar file of a checkpoint's folder."""
        return await self._vault.make_archive(self._vault.find_checkpoint(tenant, path))

    async def wait_until_broken(self) -> None:
        """Wait until the disk refuses a write, and raise the StoreError: nothing can be
        acknowledged after that."""
        await asyncio.wrap_future(self.store.broken)

    async def load(self) -> None:
        """Take up what the journal holds."""
        await self._sessions.load()
        models = [self._placed(row) for row in await self.store.run(record_rows.live_models)]
        for row in await self.store.run(record_rows.all_samplers):
            self._samplers[row.record.sampler_id] = row
        await self._vault.load(row.recovery_folder for row in models)
        for row in models:
            model_id = row.record.model_id
            size = await self.store.run(lambda db, key=model_id: order_rows.kept_bytes(db, key))
            model = LiveModel(row, ModelLine(row.next_seq), journaled=size)
            find = partial(order_rows.refused_numbers, model_id=model_id)
            for seq_id in await self.store.run(find):
                model.line.pass_over(seq_id)
            self._training.models[model_id] = model
        for order in await self._book.load():
            await self._take_up(order)
        known = set(self._training.models)
        self._endings.background.start_task(self._holding.delete_strangers(known))

    def _placed(self, row: ModelRow) -> ModelRow:
        folder = row.recovery_folder
        return replace(row, recovery_folder=folder and self._vault.place_of(folder))

    async def keep_house(self) -> None:
        """End stale sessions, and drop what was kept long enough, as time goes by."""
        while True:
            try:
                await self._look()
            except Exception:  # noqa: BLE001 - the next look may find it better
                _log.exception("keeping house failed")
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        self._book.problem = self._vault.problem_with_disk()
        self._training.give_up_overdue(self._ticks())
        for session_id in self._sessions.stale(self._limits.stale_s):
            reason = f"no heartbeat came for {self._limits.stale_s:g} s"
            await self._endings.end(session_id, reason, keep=True)
        for row in self._vault.expired():
            await self._delete_checkpoint(row.record.path)
        await self._book.drop_old()

    async def stop(self) -> None:
        """End all work; what is open is taken up by the next process."""
        running = [order.task for order in self._book.open.values() if order.task]
        await cancel_tasks((*running, *self._endings.background.running))
        await self._book.flush()

    async def _make_room(self, tenant: str, base: BaseFacts) -> None:
        """End the session that has been silent for longest, if its models are in the way of a new
        one: a client that was killed has left them."""
        records = [model.row.record for model in self._training.models.values()]
        mine = [record for record in records if record.tenant == tenant]
        if len(mine) >= self._limits.most_models:
            records = mine
        elif len(records) < base.max_models:
            return
        holding = {record.session_id for record in records}
        for session_id in self._sessions.stale(self._limits.silent_s):
            if session_id in holding:
                reason = "it was silent, and another needed its place"
                await self._endings.end(session_id, reason, keep=True)
                return

    async def _submit_sample(self, order: ClientOrder) -> Accepted:
        asked = self._sampler_intake.read(order, (await self.facts())[1].model)
        if row := self._samplers.get(asked[0]):
            order = replace(order, session_id=row.record.session_id)
        if order.session_id:
            await self._sessions.touch(order.tenant, order.session_id)
        accepted, opened = await self._sampler_intake.submit(order, asked)
        if opened is not None and not await self._is_late(opened):
            self._sampling.add(opened, asked)
        return accepted

    async def _is_late(self, order: OpenOrder) -> bool:
        """Return whether an order's session has ended since, and then fail it."""
        of_model = order.row.kind is not Kind.SAMPLE
        ended = not self._sessions.is_open(order.row.session_id)
        if not ended and not (of_model and order.row.place not in self._training.models):
            return False
        await self._book.finish(order, user_failure("its session or model has ended"))
        return True

    async def _take_up(self, order: OpenOrder) -> None:
        """Carry out an order of the journal."""
        if await self._is_late(order):
            return
        if order.row.kind is not Kind.SAMPLE:
            self._training.add(order)
            return
        try:
            asked = self._sampler_intake.wire.read_sample(await self._book.read_body(order))
        except Exception as error:  # noqa: BLE001 - another version may have written it
            await self._book.finish(order, internal_failure(error))
        else:
            self._sampling.add(order, asked)

    async def _delete_checkpoint(self, path: str) -> None:
        await self._engine.close(path)
        # Another call may have deleted it meanwhile.
        if row := self._vault.checkpoints.get(path):
            await self._vault.delete_checkpoint(row)

    def _queue_state(self, order: OpenOrder) -> str:
        sample = order.row.kind is Kind.SAMPLE
        watch = self._engine.watch if sample else self._holding.watch
        return "paused_capacity" if watch.is_away else "active"


@contextmanager
def _refused_by_disk() -> Generator[None]:
    try:
        yield
    except StoreError as error:
        raise Away(f"the server's journal cannot be written: {error}") from error


@asynccontextmanager
async def open_desk(
    folder: Path,
    training: TrainingPeer,
    sampling: SamplingPeer,
    wire: OrderWire,
    *,
    limits: Limits = DEFAULT_LIMITS,
    clock: Callable[[], float] = time.time,
    ticks: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Desk]:
    """Open or create the journal of a folder and carry its orders out during the block. `clock`
    tells the time, `ticks` how long nobody was heard of.

    Raises StoreError if the journal cannot be used; `Desk.wait_until_broken` when it no longer
    can."""
    store = Store(folder)
    try:
        desk = Desk(store, limits, training, sampling, wire, clock, ticks)
        await desk.load()
        async with running_tasks(desk.keep_house()):
            try:
                yield desk
            finally:
                await desk.stop()
    finally:
        await asyncio.to_thread(store.close)
