"""Carries the orders of models out: those of one model in order, models in fair shares of the
trainer between tenants, by tokens.

The trainer computes one order at a time, and the next is chosen when its result is written: in its
own queue, or without the model whose order just ended, all would get equal numbers of orders.

One attempt is one task. What was lost with the trainer is tried again, after its model is held
again."""

import asyncio
import sqlite3
from dataclasses import dataclass, replace
from functools import partial

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_tinker.ports import OrderRefused, OrderWire, OutOfOrder, Unavailable, Unknown
from flotilla_tinker.store import order_rows, record_rows
from flotilla_tinker.store.record_rows import ModelRow
from flotilla_tinker.types import AdamSettings, Failure, Kind, LossBatch, LossResult, Result
from flotilla_tinker.work.fair_share import FairShare
from flotilla_tinker.work.live_model import LiveModel, advance
from flotilla_tinker.work.model_holding import Answer, Asked, ModelHolding
from flotilla_tinker.work.model_saves import ModelSaves, Saved
from flotilla_tinker.work.order_book import OpenOrder, OrderBook, user_failure
from flotilla_tinker.work.sampling_carrier import internal_failure, poison
from flotilla_tinker.work.vault import Vault

_SMALL_COST = 1.0
# Before an order is tried again that the trainer found out of order.
_PAUSE_S = 0.1
# What gives a model other weights, and leaves no gradient.
_NEW_WEIGHTS = (Kind.OPTIM_STEP, Kind.LOAD_WEIGHTS)
_SAVES = (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER)


@dataclass(frozen=True, slots=True)
class _Done:
    """An order's outcome, and what it changed."""

    outcome: Result | Failure
    # The trainer counted it.
    operation: bool = False
    saved: Saved | None = None
    # It ended the model.
    ended: bool = False


class TrainingCarrier:
    """All models of open sessions, and their orders."""

    def __init__(
        self,
        book: OrderBook,
        holding: ModelHolding,
        saves: ModelSaves,
        vault: Vault,
        wire: OrderWire,
    ) -> None:
        self.models: dict[str, LiveModel] = {}
        self._book = book
        self._holding = holding
        self._saves = saves
        self._vault = vault
        self._wire = wire
        self._shares = FairShare()
        # An order is at the trainer.
        self._busy = False

    def add(self, order: OpenOrder) -> None:
        """Carry an order out when those before it are done."""
        self.models[order.row.place].line.add(order)
        self.start_next()

    async def pass_over(self, tenant: str, model_id: str, seq_id: int) -> None:
        """Have a model's orders not wait for one that was refused, nor after a restart."""
        model = self.models.get(model_id)
        if model is None or model.row.record.tenant != tenant or not model.line.may_pass(seq_id):
            return
        note = partial(_note_refused, model_id, seq_id)
        await self._book.store.run(note)
        model.line.pass_over(seq_id)
        self.start_next()

    def start_next(self) -> None:
        """Start the next order if the trainer is free."""
        ready = [] if self._busy or self._book.is_broken else self._ready()
        if ready:
            tenant = self._shares.choose_next({order.row.tenant for _, order in ready})
            mine = [each for each in ready if each[1].row.tenant == tenant]
            model, order = min(mine, key=lambda each: each[1].row.number)
            self._busy = True
            model.task = order.task = asyncio.create_task(self._carry(model, order))

    def give_up_overdue(self, now: float) -> None:
        """Fail orders that have waited too long for one before them."""
        limit_s = self._book.limits.gap_s
        for model in self.models.values():
            if model.task is None:
                model.line.give_up_overdue(now, limit_s)
        self.start_next()

    async def end_model(self, model: LiveModel, failure: Failure) -> None:
        """Fail a model's open orders and forget it; the trainer forgets it when it can."""
        self.models.pop(model.model_id, None)
        if model.task is not None:
            await cancel_tasks((model.task,))
        for order in list(model.line.waiting.values()):
            await self._book.finish(order, failure)

    def _ready(self) -> list[tuple[LiveModel, OpenOrder]]:
        idle = (model for model in self.models.values() if model.task is None)
        found = ((model, model.line.next_order()) for model in idle)
        return [(model, order) for model, order in found if order is not None]

    async def _carry(self, model: LiveModel, order: OpenOrder) -> None:
        try:
            done = await self._attempt(model, order)
            if done is not None:
                await self._finish(model, order, done)
                if done.operation and self._holding.needs_recovery_point(model, order.row.kind):
                    await self._holding.save_recovery_point(model)
        finally:
            model.task = order.task = None
            self._busy = False
            asyncio.get_running_loop().call_soon(self.start_next)

    async def _attempt(self, model: LiveModel, order: OpenOrder) -> _Done | None:
        """Carry an order out; return None to try again."""
        if order.failure is not None:
            return _Done(order.failure)
        watch = self._holding.watch
        await watch.facts()
        era = watch.era
        try:
            return await self._perform(model, order, era)
        except OrderRefused as error:
            failure = user_failure(str(error))
            if order.row.seq_id != 0:
                return _Done(failure)
            return await self._abandon(model, order, failure)
        except Unknown:
            model.held_in_era = -1
        except OutOfOrder:
            await self._holding.forget(model)
            await asyncio.sleep(_PAUSE_S)
        except Unavailable as error:
            order.deaths += watch.note_loss(era)
            if failure := poison(order, self._book.limits.most_deaths, error):
                return await self._abandon(model, order, failure)
        except Exception as error:  # noqa: BLE001 - the client's future must end whatever is wrong
            return await self._abandon(model, order, internal_failure(error))
        return None

    async def _abandon(self, model: LiveModel, order: OpenOrder, failure: Failure) -> _Done:
        """Have the trainer hold the model as it was before an order that may have changed it; not
        at all if the order was to create it."""
        await self._holding.forget(model)
        return _Done(failure, ended=order.row.seq_id == 0)

    async def _perform(self, model: LiveModel, order: OpenOrder, era: int) -> _Done:
        kind = order.row.kind
        if kind is Kind.UNLOAD_MODEL:
            await self._holding.delete(model.model_id)
            return _Done(self._wire.write_json(kind, model_id=model.model_id), ended=True)
        await self._holding.ensure_held(model)
        self._holding.watch.note_success(era)
        if kind is Kind.CREATE_MODEL:
            self._shares.charge(order.row.tenant, _SMALL_COST)
            return _Done(self._wire.write_json(kind, model_id=model.model_id))
        body = await self._book.read_body(order)
        if kind in _SAVES:
            self._shares.charge(order.row.tenant, _SMALL_COST)
            save, number = self._wire.read_save(body), order.row.seq_id
            saved = await self._saves.save(model, kind, save, number)
            return _Done(saved.result, saved=saved)
        return await self._train(model, order, body)

    async def _train(self, model: LiveModel, order: OpenOrder, body: bytes) -> _Done:
        asked = await asyncio.to_thread(self._holding.read, order.row.kind, body)
        self._shares.charge(order.row.tenant, _cost_of(asked))
        number = model.newest_operation + 1
        answer = await self._holding.apply(model.model_id, number, asked)
        counted = not (isinstance(asked, LossBatch) and asked.forward_only)
        return _Done(self._write_answer(asked, answer), operation=counted)

    def _write_answer(self, asked: Asked, answer: Answer) -> Result:
        if isinstance(asked, LossBatch):
            assert isinstance(answer, LossResult)
            body = self._wire.write_loss_result(answer, asked)
            return Result(body, "application/x-protobuf")
        if isinstance(asked, AdamSettings):
            return self._wire.write_json(Kind.OPTIM_STEP, metrics=answer)
        return self._wire.write_json(Kind.LOAD_WEIGHTS, path=asked.path)

    async def _finish(self, model: LiveModel, order: OpenOrder, done: _Done) -> None:
        saved, row = done.saved, self._row_after(model, order, done)

        def write(db: sqlite3.Connection) -> None:
            record_rows.save_model(db, row)
            if done.ended:
                order_rows.drop_operations(db, model.model_id, row.operations)
            if saved:
                saved.write(db)

        def note() -> None:
            model.row = row
            model.line.remove(order)
            if done.operation:
                model.is_clean = order.row.kind in _NEW_WEIGHTS
                model.journaled += order.row.size
            if saved:
                saved.note()

        operation = row.operations if done.operation else None
        await self._book.finish(order, done.outcome, write, operation=operation, note=note)
        if saved:
            await self._vault.remove_folders((saved.old_folder,))
        if done.ended:
            model.task = None  # this one
            await self.end_model(model, user_failure(f"the model {model.model_id} is gone"))
            await self._vault.remove_folders((row.recovery_folder,))

    def _row_after(self, model: LiveModel, order: OpenOrder, done: _Done) -> ModelRow:
        row = advance(
            model.row,
            next_seq=model.line.seq_after(order),
            operations=int(done.operation),
            updates=int(done.operation and order.row.kind in _NEW_WEIGHTS),
        )
        ended_s = self._book.clock() if done.ended else None
        return replace(row, record=replace(row.record, ended_s=ended_s))


def _note_refused(model_id: str, seq_id: int, db: sqlite3.Connection) -> None:
    order_rows.note_refused(db, model_id, seq_id)


def _cost_of(asked: Asked) -> float:
    """Return the tokens that an order has trained."""
    if not isinstance(asked, LossBatch):
        return _SMALL_COST
    return _SMALL_COST + sum(len(each.token_ids) for each in asked.sequences)
