"""The end of a session: its orders fail, its models and samplers go, its checkpoints stay.

A session that ends because its client fell silent leaves its models' last states as checkpoints
called `last`, so that the client, once it is back, continues from there."""

import asyncio
import sqlite3
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.telemetry.log import get_logger
from flotilla_tinker.store import record_rows
from flotilla_tinker.store.record_rows import SamplerRow
from flotilla_tinker.types import Kind
from flotilla_tinker.work.engine_samplers import EngineSamplers
from flotilla_tinker.work.live_model import LiveModel
from flotilla_tinker.work.model_holding import ModelHolding
from flotilla_tinker.work.model_saves import new_checkpoint
from flotilla_tinker.work.order_book import OrderBook, user_failure
from flotilla_tinker.work.sampling_carrier import SamplingCarrier
from flotilla_tinker.work.session_book import SessionBook
from flotilla_tinker.work.training_carrier import TrainingCarrier
from flotilla_tinker.work.vault import Vault, checkpoint_path

# Name of the checkpoint of a model's last state.
LAST = "last"
# How long its saving may take.
_SAVE_S = 120.0
_log = get_logger(__name__)


@dataclass(slots=True)
class SessionEndings:
    """Ends sessions everywhere."""

    book: OrderBook
    sessions: SessionBook
    training: TrainingCarrier
    sampling: SamplingCarrier
    holding: ModelHolding
    engine: EngineSamplers
    vault: Vault
    samplers: dict[str, SamplerRow]
    # Farewells to the peers, which may be away.
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def end(self, session_id: str, reason: str, *, keep: bool) -> None:
        """End a session for good; the peers hear of it when they can. With `keep` the last states
        of its models are kept for a while."""
        _log.info("a session ends", session=session_id, reason=reason)
        self.sessions.forget(session_id)
        failure = user_failure(f"the session has ended: {reason}")
        models = [
            model
            for model in self.training.models.values()
            if model.row.record.session_id == session_id
        ]
        for model in models:
            await self.training.end_model(model, failure)
            if keep:
                await self._keep_last_state(model)
        orders = [each for each in self.book.open.values() if each.row.session_id == session_id]
        samples = [each for each in orders if each.row.kind is Kind.SAMPLE]
        await asyncio.gather(*(self.sampling.give_up(order, failure) for order in samples))
        now = self.book.clock()
        folders = await self.book.store.run(lambda db: record_rows.end_session(db, session_id, now))
        gone = self._forget_weights(session_id)
        for model in models:
            self.background.start_task(self.holding.delete(model.model_id))
        self.background.start_task(self._remove_weights(gone, folders))

    async def _keep_last_state(self, model: LiveModel) -> None:
        """Make a checkpoint of a model's state, or of its newest recovery point if the trainer
        has lost it or a gradient is accumulated."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SAVE_S):
                await self.holding.save_last_state(model)
        folder = model.row.recovery_folder
        if folder is None:
            return
        now, path = self.book.clock(), checkpoint_path(model.model_id, "training", LAST)
        size = await asyncio.to_thread(_size_of, Path(folder))
        expires_s = now + self.book.limits.last_state_s
        row = new_checkpoint(model, path, folder, now, size, expires_s)
        model.row = replace(model.row, recovery_folder=None)

        def write(db: sqlite3.Connection) -> None:
            record_rows.put_checkpoint(db, row)
            record_rows.save_model(db, model.row)

        await self.book.store.run(write)
        self.vault.checkpoints[path] = row

    def _forget_weights(self, session_id: str) -> list[str]:
        for sampler_id, row in list(self.samplers.items()):
            if row.record.session_id == session_id:
                del self.samplers[sampler_id]
        weights = self.vault.weights
        gone = [key for key, row in weights.items() if row.session_id == session_id]
        for weights_id in gone:
            del weights[weights_id]
        return gone

    async def _remove_weights(self, weights_ids: list[str], folders: list[str]) -> None:
        for weights_id in weights_ids:
            await self.engine.close(weights_id)
        await self.vault.remove_folders(folders)


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
