"""Keeps the trainer holding the models: after a loss it loads a model's newest recovery point and
repeats the journaled operations since. Training is deterministic, so that the weights are the same.

The trainer's numbers of operations begin anew with each holding: loading the recovery point that
was saved after operation r is its operation 1, hence `ModelRow.numbering` is r - 1."""

import asyncio
import sqlite3
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from flotilla_common.telemetry.log import get_logger
from flotilla_tinker.ports import (
    OrderRefused,
    OrderWire,
    OutOfOrder,
    TrainingPeer,
    Unavailable,
    Unknown,
)
from flotilla_tinker.store import order_rows, record_rows
from flotilla_tinker.store.record_rows import ModelRow
from flotilla_tinker.store.store import Store
from flotilla_tinker.types import AdamSettings, BaseFacts, Kind, LoadOrder, LossBatch, LossResult
from flotilla_tinker.work.limits import Limits
from flotilla_tinker.work.live_model import LiveModel
from flotilla_tinker.work.peer_watch import PeerWatch
from flotilla_tinker.work.vault import Vault

# What a client asks of a model, and what the trainer answers.
Asked = LossBatch | AdamSettings | LoadOrder
Answer = LossResult | Mapping[str, float] | None

_log = get_logger(__name__)


class ModelHolding:
    """What the trainer holds, and how it comes to hold it again."""

    def __init__(
        self, peer: TrainingPeer, store: Store, vault: Vault, wire: OrderWire, limits: Limits
    ) -> None:
        self.peer = peer
        self.watch = PeerWatch[BaseFacts](peer.describe_base)
        self._store = store
        self._vault = vault
        self._wire = wire
        self._limits = limits

    async def ensure_held(self, model: LiveModel) -> None:
        """Have the trainer hold the model as it is after its newest operation.

        Raises the peer's errors."""
        era = self.watch.era
        if model.held_in_era == era:
            return
        held = (await self.peer.describe_base()).models.get(model.model_id)
        if held is not None and held > model.newest_operation + 1:
            await self.peer.delete_model(model.model_id)
            held = None
        if held is None:
            held = await self._create(model)
            self.watch.note_success(era)
        for operation in range(held + model.row.numbering + 1, model.row.operations + 1):
            await self._repeat(model, operation)
        model.held_in_era = era

    async def apply(self, model_id: str, number: int, asked: Asked) -> Answer:
        """Carry out an operation that changes a model; return the trainer's answer."""
        if isinstance(asked, LossBatch):
            return await self.peer.forward_backward(model_id, number, asked)
        if isinstance(asked, AdamSettings):
            return await self.peer.apply_update(model_id, number, asked)
        checkpoint = self._vault.checkpoints.get(asked.path)
        if checkpoint is None:
            raise OrderRefused(f"there is no checkpoint {asked.path!r}; save_state names one")
        return await self.peer.load_state(
            model_id, number, checkpoint.folder, with_optimizer=asked.with_optimizer
        )

    def read(self, kind: Kind, body: bytes) -> Asked:
        """Return what an order of the trainer asks for."""
        if kind is Kind.OPTIM_STEP:
            return self._wire.read_optim_step(body)
        if kind is Kind.LOAD_WEIGHTS:
            return self._wire.read_load(body)
        return self._wire.read_forward_backward(body)

    async def forget(self, model: LiveModel) -> None:
        """Have the trainer not hold the model, however long it is away."""
        model.held_in_era = -1
        await self.delete(model.model_id)

    async def delete(self, model_id: str) -> None:
        """Free the trainer's memory, however long it is away."""
        while True:
            await self.watch.facts()
            era = self.watch.era
            try:
                await self.peer.delete_model(model_id)
            except Unavailable:
                self.watch.note_loss(era)
            except (Unknown, OrderRefused, OutOfOrder):
                return
            else:
                return

    async def delete_strangers(self, known: set[str]) -> None:
        """Have the trainer forget models that no open session has."""
        facts = await self.watch.facts()
        for model_id in set(facts.models) - known:
            await self.delete(model_id)

    async def save_recovery_point(self, model: LiveModel) -> None:
        """Save the model's state, and drop the operations before it from the journal.

        Call it only when no gradient is accumulated. A failure is logged: the next one may do."""
        row, folder = model.row, self._vault.new_folder()
        era = self.watch.era
        try:
            await self.peer.save_state(model.model_id, model.newest_operation, folder)
        except (OrderRefused, Unknown, OutOfOrder, Unavailable) as error:
            _log.warning("no recovery point", model=model.model_id, error=str(error))
            if isinstance(error, Unavailable):
                self.watch.note_loss(era)
            else:
                model.held_in_era = -1
            return await self._vault.remove_folders((folder,))
        saved = replace(
            row,
            recovery_folder=folder,
            recovery_operation=row.operations,
            recovery_updates=row.record.updates,
        )

        def write(db: sqlite3.Connection) -> None:
            record_rows.save_model(db, saved)
            order_rows.drop_operations(db, model.model_id, row.operations)

        await self._store.run(write)
        model.row, model.journaled = saved, 0
        return await self._vault.remove_folders((row.recovery_folder,))

    async def save_last_state(self, model: LiveModel) -> None:
        """Save a recovery point if the trainer holds the model with more than the last one has."""
        held = model.held_in_era == self.watch.era and not self.watch.is_away
        if held and model.is_clean and model.row.operations > model.row.recovery_operation:
            await self.save_recovery_point(model)

    def needs_recovery_point(self, model: LiveModel, kind: Kind) -> bool:
        """Return whether to save the state after an order of this kind.

        After loading always: the loaded checkpoint may be deleted."""
        if kind is not Kind.OPTIM_STEP:
            return kind is Kind.LOAD_WEIGHTS
        updates = model.row.record.updates - model.row.recovery_updates
        limits = self._limits
        return updates >= limits.recovery_updates or model.journaled >= limits.recovery_bytes

    async def _create(self, model: LiveModel) -> int:
        """Create the model at the trainer; return the number of its newest operation there."""
        row = model.row
        numbering = row.recovery_operation - 1 if row.recovery_folder else 0
        if row.numbering != numbering:
            model.row = row = replace(row, numbering=numbering)
            await self._store.run(partial(_save, row))
        return await self.peer.create_model(model.model_id, row.record.settings)

    async def _repeat(self, model: LiveModel, operation: int) -> None:
        """Have the trainer repeat an operation that has its result."""
        row, number = model.row, operation - model.row.numbering
        if row.recovery_folder and operation == row.recovery_operation:
            folder = row.recovery_folder
            await self.peer.load_state(model.model_id, number, folder, with_optimizer=True)
            return
        find = partial(_find_operation, model.model_id, operation)
        found = await self._store.run(find)
        if found is None:
            raise OrderRefused(f"operation {operation} of {model.model_id} is not in the journal")
        kind, packed = found
        asked = await asyncio.to_thread(lambda: self.read(kind, zlib.decompress(packed)))
        await self.apply(model.model_id, number, asked)


def _save(row: ModelRow, db: sqlite3.Connection) -> None:
    record_rows.save_model(db, row)


def _find_operation(
    model_id: str, operation: int, db: sqlite3.Connection
) -> tuple[Kind, bytes] | None:
    return order_rows.find_operation(db, model_id, operation)
