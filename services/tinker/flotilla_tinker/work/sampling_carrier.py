"""Carries samples out: as many concurrently as the engine runs, in fair shares between tenants.

A sample changes nothing, so that one whose result was lost is sampled again."""

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass

from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.telemetry.log import get_logger
from flotilla_tinker.ports import OrderRefused, OrderWire, Unavailable, Unknown
from flotilla_tinker.store.record_rows import SamplerRow
from flotilla_tinker.types import Category, Failure, SampleOrder
from flotilla_tinker.work.engine_samplers import EngineSamplers, WeightsGone
from flotilla_tinker.work.fair_share import FairShare
from flotilla_tinker.work.order_book import OpenOrder, OrderBook, Outcome, user_failure
from flotilla_tinker.work.vault import BASE_WEIGHTS, SCHEME

_log = get_logger(__name__)
# Before the engine has said how many it runs.
_FEW = 1


@dataclass(slots=True, eq=False)
class _Waiting:
    order: OpenOrder
    # Samples, and what to sample if it is small enough to be kept.
    cost: int
    asked: tuple[str, SampleOrder] | None


def weights_of(target: str, samplers: dict[str, SamplerRow]) -> str:
    """Return the id of the weights that a sample's target names: a sampler's id, a checkpoint's
    path, or the base model."""
    if row := samplers.get(target):
        return row.weights_id
    return target if target.startswith(SCHEME) else f"{BASE_WEIGHTS}:{target}"


class SamplingCarrier:
    """Samples that wait and that run."""

    def __init__(
        self,
        book: OrderBook,
        engine: EngineSamplers,
        samplers: dict[str, SamplerRow],
        wire: OrderWire,
    ) -> None:
        self._book = book
        self._engine = engine
        self._samplers = samplers
        self._wire = wire
        self._shares = FairShare()
        # By tenant, in order of arrival; without empty ones.
        self._waiting: dict[str, deque[_Waiting]] = {}
        # Those that run, and their samples.
        self._running: set[_Waiting] = set()
        self._samples = 0

    def add(self, order: OpenOrder, asked: tuple[str, SampleOrder]) -> None:
        """Carry an order out as soon as it is its turn."""
        keep = asked if order.body is not None else None
        self._put(_Waiting(order, max(1, asked[1].num_samples), keep))
        self.start_next()

    def start_next(self) -> None:
        """Start all orders that may run now."""
        while self._waiting and not self._book.is_broken:
            tenant = self._shares.choose_next(self._waiting)
            waiting = self._waiting[tenant][0]
            if waiting.order.outcome.done():  # cancelled
                self._take(tenant)
                continue
            if self._running and self._samples + waiting.cost > self._most_with(waiting):
                return
            self._take(tenant)
            self._shares.charge(tenant, waiting.cost)
            self._running.add(waiting)
            self._samples += waiting.cost
            waiting.order.task = asyncio.create_task(self._carry(waiting))

    async def give_up(self, order: OpenOrder, failure: Failure) -> None:
        """End an order that nobody waits for."""
        if order.task is not None:
            await cancel_tasks((order.task,))
        await self._book.finish(order, failure)
        self.start_next()

    def _most_with(self, waiting: _Waiting) -> int:
        """Return how many samples may run together with these.

        Each time the engine dies with some, they run in a smaller crowd, and before they are given
        up alone: what did not kill it is then cleared."""
        facts = self._engine.watch.last_facts
        most = facts.max_num_seqs if facts else _FEW
        deaths = max(each.order.deaths for each in (waiting, *self._running))
        return int(most ** max(0.0, 1 - deaths / (self._book.limits.most_deaths - 1)))

    async def _carry(self, waiting: _Waiting) -> None:
        order = waiting.order
        try:
            outcome = await self._attempt(waiting)
        finally:
            order.task = None
            self._running.discard(waiting)
            self._samples -= waiting.cost
            asyncio.get_running_loop().call_soon(self.start_next)
        if outcome is None:
            self._put(waiting, first=True)
        else:
            await self._book.finish(order, outcome)

    async def _attempt(self, waiting: _Waiting) -> Outcome | None:
        """Sample; return None to try again."""
        order, watch = waiting.order, self._engine.watch
        weights_id = ""
        era = watch.era
        try:
            await watch.facts()
            era = watch.era
            asked = waiting.asked or self._wire.read_sample(await self._book.read_body(order))
            weights_id = weights_of(asked[0], self._samplers)
            async with self._engine.using(weights_id):
                result = await self._engine.peer.sample(weights_id, asked[1])
            return self._wire.write_sample_result(result, asked[1])
        except (OrderRefused, WeightsGone) as error:
            return user_failure(str(error))
        except Unknown:
            self._engine.forget(weights_id)
            return None
        except Unavailable as error:
            order.deaths += watch.note_loss(era)
            return poison(order, self._book.limits.most_deaths, error)
        except Exception as error:  # noqa: BLE001 - the client's future must end whatever is wrong
            return internal_failure(error)

    def _put(self, waiting: _Waiting, *, first: bool = False) -> None:
        line = self._waiting.setdefault(waiting.order.row.tenant, deque())
        line.appendleft(waiting) if first else line.append(waiting)

    def _take(self, tenant: str) -> None:
        line = self._waiting[tenant]
        line.popleft()
        if not line:
            del self._waiting[tenant]


def poison(order: OpenOrder, most_deaths: int, error: Exception) -> Failure | None:
    """Return the failure of an order that a peer did not survive so often; None to try again."""
    if order.deaths < most_deaths:
        return None
    text = f"what carries it out died {order.deaths} times while it did: {error}"
    return Failure(text, Category.SERVER)


def internal_failure(error: Exception) -> Failure:
    """Return a failure whose cause is in the log: its text may hold what is not the client's."""
    error_id = secrets.token_hex(6)
    _log.error("an order failed", error_id=error_id, exc_info=error)
    return Failure(f"internal error {error_id}; see the server's log", Category.SERVER)
