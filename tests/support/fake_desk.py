"""A desk of the front door in memory, for tests of its HTTP calls: orders get the results that a
test has set."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_tinker.types import (
    Accepted,
    BaseFacts,
    CheckpointRecord,
    ClientOrder,
    EngineFacts,
    Failure,
    ModelRecord,
    ModelSettings,
    Pending,
    Result,
    SamplerRecord,
)
from flotilla_tinker.work.desk_errors import Conflict, DeskError, GoneError, NotFound

MODEL = "tiny/model"
BASE = BaseFacts(MODEL, 64, 100, 32, 4, ("cross_entropy", "importance_sampling", "ppo"), {})
ENGINE = EngineFacts(MODEL, 48, 100, 16, 8, (), 64)
MODEL_ID = "s1:train:0"
SAMPLER_ID = "s1:sample:0"


class FakeDesk:
    """One tenant's session `s1` with the model and the sampler above; `error` is raised by the next
    call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all that has happened."""
        self.error: Exception | None = None
        self.orders: list[ClientOrder] = []
        self.results: dict[str, Result | Failure] = {}
        self.cancelled: list[str] = []
        self.passed_over: list[tuple[str, str, int]] = []
        self.ttls: list[tuple[str, float | None]] = []
        self.deleted: list[str] = []
        self.finished: list[str] = []
        self.opened: list[tuple[str, int, str | None, str | None]] = []
        self.sessions: list[Mapping[str, Any]] = []
        self.asked_facts = 0
        self.archive_file = Path("missing")
        self.models = [
            ModelRecord(MODEL_ID, "s1", "alice", ModelSettings(MODEL, 8), 1_700_000_000.0, 9, 4)
        ]
        self.checkpoints = [
            _make_checkpoint("weights/a", "training"),
            _make_checkpoint("sampler_weights/b", "sampler"),
        ]

    def _check(self) -> None:
        if (error := self.error) is not None:
            self.error = None
            raise error

    async def facts(self) -> tuple[BaseFacts, EngineFacts]:
        self.asked_facts += 1
        self._check()
        return BASE, ENGINE

    async def open_session(self, tenant: str, facts: Mapping[str, Any]) -> str:
        self._check()
        self.sessions.append(facts)
        return f"s{len(self.sessions)}"

    async def heartbeat(self, tenant: str, session_id: str) -> None:
        if session_id in self.finished:
            raise GoneError(f"the session {session_id} has finished")

    async def finish_session(self, tenant: str, session_id: str) -> None:
        self.finished.append(session_id)

    async def submit(self, order: ClientOrder) -> Accepted:
        self._check()
        for number, other in enumerate(self.orders):
            if _place_of(other) == _place_of(order):
                if other.body != order.body:
                    raise Conflict("another order has this number")
                return Accepted(f"r{number}", other.facts)
        self.orders.append(order)
        return Accepted(f"r{len(self.orders) - 1}", order.facts)

    async def wait(
        self, tenant: str, request_id: str, timeout_s: float
    ) -> Result | Failure | Pending:
        self._check()
        if request_id in self.results:
            return self.results[request_id]
        if request_id not in (f"r{number}" for number in range(len(self.orders))):
            raise NotFound(f"there is no future {request_id}")
        await asyncio.sleep(timeout_s)
        return Pending("active")

    async def cancel(self, tenant: str, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def open_sampling_session(
        self,
        tenant: str,
        session_id: str,
        seq_id: int,
        *,
        base_model: str | None,
        model_path: str | None,
    ) -> str:
        self.opened.append((session_id, seq_id, base_model, model_path))
        return f"{session_id}:sample:{seq_id}"

    async def describe_sampler(self, tenant: str, sampler_id: str) -> SamplerRecord:
        if sampler_id != SAMPLER_ID:
            raise NotFound(f"there is no sampler {sampler_id}")
        return SamplerRecord(SAMPLER_ID, "s1", "alice", MODEL, None)

    async def describe_model(self, tenant: str, model_id: str) -> ModelRecord:
        for model in await self.list_models(tenant):
            if model.model_id == model_id:
                return model
        raise NotFound(f"there is no model {model_id}")

    async def list_models(self, tenant: str) -> Sequence[ModelRecord]:
        return [model for model in self.models if model.tenant == tenant]

    async def list_checkpoints(
        self, tenant: str, model_id: str | None
    ) -> Sequence[CheckpointRecord]:
        return [each for each in self.checkpoints if model_id in (None, each.model_id)]

    async def describe_checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        for each in self.checkpoints:
            if each.path == path:
                return each
        raise NotFound(f"there is no checkpoint {path}")

    async def delete_checkpoint(self, tenant: str, path: str) -> None:
        await self.describe_checkpoint(tenant, path)
        self.deleted.append(path)

    async def set_ttl(self, tenant: str, path: str, seconds: float | None) -> None:
        self.ttls.append((path, seconds))

    async def archive(self, tenant: str, path: str) -> Path:
        await self.describe_checkpoint(tenant, path)
        return self.archive_file

    async def pass_over(self, tenant: str, model_id: str, seq_id: int) -> None:
        self.passed_over.append((tenant, model_id, seq_id))

    async def wait_until_broken(self) -> None:
        await asyncio.Event().wait()


def _place_of(order: ClientOrder) -> tuple[object, ...]:
    return order.model_id, order.facts.get("sampler_id"), order.seq_id


def _make_checkpoint(place: str, kind: Any) -> CheckpointRecord:
    return CheckpointRecord(
        f"tinker://{MODEL_ID}/{place}",
        MODEL_ID,
        "alice",
        kind,
        1_700_000_000.0,
        10,
        ModelSettings(MODEL, 8),
    )


def make_desk_error(kind: type[DeskError]) -> DeskError:
    return kind("no luck")
