"""Accepts orders on models, or refuses them before they are in the journal."""

import sqlite3
from dataclasses import replace

from flotilla_tinker.ports import OrderWire
from flotilla_tinker.store import record_rows
from flotilla_tinker.store.order_rows import UNLOAD_SEQ
from flotilla_tinker.store.record_rows import ModelRow
from flotilla_tinker.types import (
    Accepted,
    BaseFacts,
    ClientOrder,
    EngineFacts,
    Kind,
    ModelRecord,
    ModelSettings,
)
from flotilla_tinker.work.desk_errors import (
    BadOrder,
    Conflict,
    DeskError,
    GoneError,
    NotFound,
    TooMuch,
)
from flotilla_tinker.work.live_model import LiveModel
from flotilla_tinker.work.model_line import ModelLine
from flotilla_tinker.work.model_saves import problem_with_name
from flotilla_tinker.work.order_book import OpenOrder, OrderBook
from flotilla_tinker.work.training_carrier import TrainingCarrier
from flotilla_tinker.work.vault import Vault

_SAVES = (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER)
_RETRY_AFTER_S = 30.0


class ModelIntake:
    """Checks orders on models, and hands new ones to the carrier."""

    def __init__(
        self, book: OrderBook, carrier: TrainingCarrier, vault: Vault, wire: OrderWire
    ) -> None:
        self._book = book
        self._carrier = carrier
        self._vault = vault
        self._wire = wire

    async def submit(
        self, order: ClientOrder, facts: tuple[BaseFacts, EngineFacts] | None
    ) -> tuple[Accepted, OpenOrder | None]:
        """Accept an order; `facts` are needed for one that creates a model.

        Raises BadOrder, Conflict, GoneError, NotFound, TooLarge and TooMuch."""
        if facts is not None:
            return await self._create(order, *facts)
        model_id = order.model_id or ""
        seq_id = UNLOAD_SEQ if order.kind is Kind.UNLOAD_MODEL else order.seq_id
        problem = self._problem_of(order, seq_id)

        def check(db: sqlite3.Connection) -> None:
            row = record_rows.find_model(db, model_id)
            if row is None or row.record.tenant != order.tenant:
                raise NotFound(f"there is no model {model_id!r}: create it")
            if row.record.ended_s is not None:
                raise GoneError(f"the model {model_id} was unloaded")
            if UNLOAD_SEQ != seq_id < row.next_seq:
                raise Conflict(f"order {seq_id} of {model_id} comes after {row.next_seq - 1}")
            if problem:
                raise problem

        return await self._book.submit(order, model_id, seq_id, check)

    async def _create(
        self, order: ClientOrder, base: BaseFacts, engine: EngineFacts
    ) -> tuple[Accepted, OpenOrder | None]:
        model_id = order.model_id or f"{order.session_id}:train:{order.seq_id}"
        settings, problem = self._settings_of(order)
        if settings:
            problem = self._problem_with(settings, order.tenant, base, engine)
        now = self._book.clock()

        def add(db: sqlite3.Connection) -> None:
            if problem or settings is None:
                raise problem or BadOrder("the order names no model")
            record = ModelRecord(model_id, order.session_id, order.tenant, settings, now, -1, 0)
            record_rows.add_model(db, record)

        order = replace(order, model_id=model_id)
        accepted, opened = await self._book.submit(order, model_id, 0, add)
        if opened and settings:
            record = ModelRecord(model_id, order.session_id, order.tenant, settings, now, -1, 0)
            row = ModelRow(record, 0, 0, 0, None, 0, 0)
            self._carrier.models[model_id] = LiveModel(row, ModelLine(0))
        return accepted, opened

    def _settings_of(self, order: ClientOrder) -> tuple[ModelSettings | None, DeskError | None]:
        """Return a new model's settings, or why there are none."""
        if order.kind is Kind.CREATE_MODEL:
            return self._wire.read_create_model(order.body), None
        path = self._wire.read_load(order.body).path
        try:
            found = self._vault.find_checkpoint(order.tenant, path, "training")
        except NotFound as error:
            return None, error
        return found.record.settings, None

    def _problem_with(
        self, settings: ModelSettings, tenant: str, base: BaseFacts, engine: EngineFacts
    ) -> DeskError | None:
        if settings.base_model != base.model:
            return BadOrder(f"this server trains {base.model!r}, not {settings.base_model!r}")
        if settings.lora_rank > min(base.max_rank, engine.max_rank):
            return BadOrder(
                f"rank {settings.lora_rank} is too high: the trainer holds up to {base.max_rank},"
                f" the sampling engine up to {engine.max_rank}"
            )
        models = self._carrier.models.values()
        mine = [each.model_id for each in models if each.row.record.tenant == tenant]
        most = self._book.limits.most_models
        if len(mine) >= most or len(models) >= base.max_models:
            return TooMuch(
                f"{len(models)} models are trained here, {len(mine)} of them yours; there may be"
                f" {base.max_models}, and {most} of one client: unload one, or finish its session",
                _RETRY_AFTER_S,
            )
        return None

    def _problem_of(self, order: ClientOrder, seq_id: int) -> DeskError | None:
        if seq_id < 1 and seq_id != UNLOAD_SEQ:
            return BadOrder(f"seq_id is {order.seq_id}; the first order of a model has 1")
        if order.kind not in _SAVES:
            return None
        save = self._wire.read_save(order.body)
        if save.path_name is not None:
            problem = problem_with_name(save.path_name)
            return BadOrder(problem) if problem else None
        if order.kind is Kind.SAVE_WEIGHTS_FOR_SAMPLER and save.sampling_session_seq_id is None:
            return BadOrder("give the weights a path, or a sampling_session_seq_id")
        return None
