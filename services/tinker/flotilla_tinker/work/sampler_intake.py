"""Opens sampling sessions, and accepts samples."""

from flotilla_tinker.ports import OrderWire
from flotilla_tinker.store import record_rows
from flotilla_tinker.store.record_rows import SamplerRow
from flotilla_tinker.types import Accepted, ClientOrder, SampleOrder, SamplerRecord
from flotilla_tinker.work.desk_errors import BadOrder, Conflict, GoneError, NotFound
from flotilla_tinker.work.model_saves import sampler_id_of
from flotilla_tinker.work.order_book import OpenOrder, OrderBook
from flotilla_tinker.work.sampling_carrier import weights_of
from flotilla_tinker.work.vault import BASE_WEIGHTS, GONE, SCHEME, Vault


class SamplerIntake:
    """Sampling sessions by their ids, and what may be sampled from them."""

    def __init__(
        self,
        book: OrderBook,
        samplers: dict[str, SamplerRow],
        vault: Vault,
        wire: OrderWire,
    ) -> None:
        self._book = book
        self._samplers = samplers
        self._vault = vault
        self.wire = wire

    async def open_session(
        self,
        tenant: str,
        session_id: str,
        seq_id: int,
        engine_model: str,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        """Open a sampling session of a base or of saved weights; repeatable.

        Raises BadOrder, Conflict and NotFound."""
        sampler_id = sampler_id_of(session_id, seq_id)
        target = model_path or base_model or engine_model
        model = self._check_target(tenant, target, engine_model)
        weights_id = weights_of(target, {})
        record = SamplerRecord(sampler_id, session_id, tenant, model, model_path)
        row = SamplerRow(record, weights_id)
        known = self._samplers.get(sampler_id)
        if known is not None and known != row:
            raise Conflict(f"the sampling session {sampler_id} exists, with other weights")
        if known is None:
            await self._book.store.run(lambda db: record_rows.add_sampler(db, row))
            self._samplers[sampler_id] = row
        return sampler_id

    def find(self, tenant: str, sampler_id: str) -> SamplerRecord:
        """Raises NotFound."""
        row = self._samplers.get(sampler_id)
        if row is None or row.record.tenant != tenant:
            raise NotFound(f"there is no sampling session {sampler_id!r}; its session has ended")
        return row.record

    def read(self, order: ClientOrder, engine_model: str) -> tuple[str, SampleOrder]:
        """Return what to sample from, and what. Raises BadOrder, GoneError and NotFound."""
        target, sample = self.wire.read_sample(order.body)
        if target not in self._samplers and (":sample:" not in target or "//" in target):
            self._check_target(order.tenant, target, engine_model)
            return target, sample
        self.find(order.tenant, target)
        weights_id = self._samplers[target].weights_id
        if weights_id not in self._vault.weights and not weights_id.startswith(BASE_WEIGHTS):
            raise GoneError(GONE)
        return target, sample

    async def submit(
        self, order: ClientOrder, asked: tuple[str, SampleOrder]
    ) -> tuple[Accepted, OpenOrder | None]:
        return await self._book.submit(order, asked[0], order.seq_id, lambda db: None)

    def _check_target(self, tenant: str, target: str, engine_model: str) -> str:
        """Return the base model of a path, or of the base itself."""
        if target.startswith(SCHEME):
            found = self._vault.find_checkpoint(tenant, target, "sampler")
            return found.record.settings.base_model
        if target != engine_model:
            raise BadOrder(f"this server samples from {engine_model!r}, not {target[:200]!r}")
        return target
