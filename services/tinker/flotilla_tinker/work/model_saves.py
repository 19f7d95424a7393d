"""Saves of a model: as a checkpoint to continue from, or as weights for samplers."""

import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from flotilla_tinker.ports import OrderRefused, OrderWire, TrainingPeer
from flotilla_tinker.store import record_rows
from flotilla_tinker.store.record_rows import CheckpointRow, SamplerRow, WeightsRow
from flotilla_tinker.types import CheckpointRecord, Kind, Result, SamplerRecord, SaveOrder
from flotilla_tinker.work.engine_samplers import EngineSamplers
from flotilla_tinker.work.live_model import LiveModel
from flotilla_tinker.work.order_book import Write
from flotilla_tinker.work.vault import Vault, checkpoint_path, kind_of

_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved: the answer, the rows to write with it, and what to do when they are."""

    result: Result
    write: Write
    note: Callable[[], None]
    # A folder that nothing names from then on.
    old_folder: str | None = None


def problem_with_name(name: str) -> str | None:
    """Return why a checkpoint cannot have this name; None if it can."""
    if _NAME.fullmatch(name):
        return None
    return f"a checkpoint cannot be called {name[:80]!r}: use letters, digits, '.', '_' and '-'"


def new_checkpoint(
    model: LiveModel, path: str, folder: str, now: float, size: int, expires_s: float | None
) -> CheckpointRow:
    """Return a checkpoint of a model's present weights."""
    record = model.row.record
    checkpoint = CheckpointRecord(
        path=path,
        model_id=record.model_id,
        tenant=record.tenant,
        kind=kind_of(path),
        created_s=now,
        size_bytes=size,
        settings=record.settings,
        expires_s=expires_s,
    )
    return CheckpointRow(checkpoint, folder, model.label)


class ModelSaves:
    """Saves models of the trainer into folders of the vault."""

    def __init__(
        self,
        peer: TrainingPeer,
        vault: Vault,
        samplers: dict[str, SamplerRow],
        engine: EngineSamplers,
        wire: OrderWire,
        clock: Callable[[], float],
    ) -> None:
        self._peer = peer
        self._vault = vault
        self._samplers = samplers
        self._engine = engine
        self._wire = wire
        self._clock = clock

    async def save(self, model: LiveModel, kind: Kind, save: SaveOrder, number: int) -> Saved:
        """Save a model. `number` names a checkpoint without a name.

        Raises OrderRefused, and the trainer's other errors."""
        for weights_id in self._vault.unused_weights(model.row.record.tenant):
            await self._engine.close(weights_id)
            await self._vault.delete_weights(weights_id)
        if problem := self._vault.problem_with_space(model.row.record.tenant):
            raise OrderRefused(problem)
        if kind is Kind.SAVE_WEIGHTS:
            return await self._save_named(model, "training", save, number)
        if save.path_name is None:
            return await self._save_unnamed(model, save)
        return await self._save_named(model, "sampler", save, number)

    async def _save_named(self, model: LiveModel, kind: str, save: SaveOrder, number: int) -> Saved:
        name = save.path_name or f"{number:06d}"
        path = checkpoint_path(model.model_id, kind, name)
        if problem := problem_with_name(name):
            raise OrderRefused(problem)
        old = self._vault.checkpoints.get(path)
        if old and not save.overwrite:
            raise OrderRefused(f"{path} exists: choose another name, or delete it first")
        folder = self._vault.new_folder()
        write_folder = self._peer.save_state if kind == "training" else self._peer.export_weights
        size = await write_folder(model.model_id, model.newest_operation, folder)
        expires_s = None if save.ttl_s is None else self._clock() + save.ttl_s
        row = new_checkpoint(model, path, folder, self._clock(), size, expires_s)
        weights = self._weights(model, path, None, folder, size) if kind == "sampler" else None

        def write(db: sqlite3.Connection) -> None:
            record_rows.put_checkpoint(db, row)
            if weights:
                record_rows.put_weights(db, weights)

        def note() -> None:
            self._vault.checkpoints[path] = row
            if weights:
                self._vault.weights[path] = weights

        of_kind = Kind.SAVE_WEIGHTS if kind == "training" else Kind.SAVE_WEIGHTS_FOR_SAMPLER
        result = self._wire.write_json(of_kind, path=path)
        return Saved(result, write, note, old.folder if old else None)

    async def _save_unnamed(self, model: LiveModel, save: SaveOrder) -> Saved:
        """Save weights of one sampling session, or of all that follow the model in flight."""
        record = model.row.record
        sampler_id = sampler_id_of(record.session_id, save.sampling_session_seq_id or 0)
        in_flight = save.kind == "inflight"
        weights_id = f"{model.model_id}:inflight" if in_flight else sampler_id
        old = self._vault.weights.get(weights_id)
        folder = self._vault.new_folder()
        size = await self._peer.export_weights(model.model_id, model.newest_operation, folder)
        weights = self._weights(model, weights_id, record.session_id, folder, size)
        sampler = SamplerRecord(
            sampler_id, record.session_id, record.tenant, record.settings.base_model, None
        )
        row = SamplerRow(sampler, weights_id)
        if in_flight:
            await self._engine.replace(weights)

        def write(db: sqlite3.Connection) -> None:
            record_rows.put_weights(db, weights)
            record_rows.add_sampler(db, row)

        def note() -> None:
            self._vault.weights[weights_id] = weights
            self._vault.note_use(weights_id)
            self._samplers[sampler_id] = row

        result = self._wire.write_json(
            Kind.SAVE_WEIGHTS_FOR_SAMPLER, path=None, sampling_session_id=sampler_id
        )
        return Saved(result, write, note, old.folder if old else None)

    def _weights(
        self, model: LiveModel, weights_id: str, session_id: str | None, folder: str, size: int
    ) -> WeightsRow:
        record = model.row.record
        return WeightsRow(
            weights_id=weights_id,
            tenant=record.tenant,
            session_id=session_id,
            label=model.label,
            folder=folder,
            whole=record.settings.lora_rank == 0,
            size_bytes=size,
        )


def sampler_id_of(session_id: str, seq_id: int) -> str:
    return f"{session_id}:sample:{seq_id}"
