"""A desk with its peers, for one client."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_tinker.types import ClientOrder, Failure, Kind, Pending, Result
from flotilla_tinker.work.desk import Desk, open_desk
from flotilla_tinker.work.limits import Limits
from tests.support.waiting import until_seen
from tests.tinker.work.desk_doubles import (
    JsonWire,
    ScriptedEngine,
    ScriptedTrainer,
    an_order,
    create_order,
)

LIMIT_S = 30.0


@dataclass(slots=True)
class SetClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Shop:
    """A desk, its peers and a session of `ann`."""

    desk: Desk
    trainer: ScriptedTrainer
    engine: ScriptedEngine
    clock: SetClock
    session: str

    async def order(self, order: ClientOrder) -> Result | Failure:
        return await self.result_of((await self.desk.submit(order)).request_id, order.tenant)

    async def result_of(self, request_id: str, tenant: str = "ann") -> Result | Failure:
        outcome = await self.desk.wait(tenant, request_id, LIMIT_S)
        assert not isinstance(outcome, Pending)
        return outcome

    async def model(self, number: int = 0, **settings: Any) -> str:
        outcome = await self.order(create_order(self.session, number, **settings))
        return read(outcome)["model_id"]

    async def until_folders(self, number: int) -> None:
        """Wait until so many folders of weights are left."""

        async def look() -> int:
            return len(list((self.desk.store.folder / "weights").iterdir()))

        await until_seen(look, lambda found: found == number)

    async def train(
        self, model_id: str, kind: Kind, seq_id: int, /, **body: Any
    ) -> Result | Failure:
        return await self.order(an_order(kind, self.session, model_id, seq_id, **body))


def read(outcome: Result | Failure) -> Any:
    assert isinstance(outcome, Result), outcome
    return json.loads(outcome.body)


@asynccontextmanager
async def a_shop(
    folder: Path,
    limits: Limits | None = None,
    trainer: ScriptedTrainer | None = None,
    engine: ScriptedEngine | None = None,
    session: str = "",
) -> AsyncGenerator[Shop]:
    trainer, engine = trainer or ScriptedTrainer(), engine or ScriptedEngine()
    clock, limits = SetClock(), limits or Limits(free_disk_bytes=0)
    async with open_desk(
        folder, trainer, engine, JsonWire(), limits=limits, clock=clock, ticks=clock
    ) as desk:
        session = session or await desk.open_session("ann", {})
        yield Shop(desk, trainer, engine, clock, session)
