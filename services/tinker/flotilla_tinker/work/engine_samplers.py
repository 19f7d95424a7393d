"""The weights that the engine holds: opened when they are first used, closed when others need the
room, and opened again after the engine was lost."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from flotilla_common.aio.change_signal import ChangeSignal
from flotilla_tinker.ports import OrderRefused, SamplingPeer, Unavailable, Unknown
from flotilla_tinker.store.record_rows import WeightsRow
from flotilla_tinker.types import EngineFacts, SamplerWeights
from flotilla_tinker.work.peer_watch import PeerWatch
from flotilla_tinker.work.vault import BASE_WEIGHTS, GONE, Vault

# The label of weights that have to be closed and opened.
_NONE = ""


class WeightsGone(Exception):
    """The sampler's weights were deleted."""


@dataclass(slots=True)
class _Opened:
    label: str
    folder: str | None
    users: int = 0


class EngineSamplers:
    """Samplers at the engine, by the id of their weights."""

    def __init__(self, peer: SamplingPeer, vault: Vault) -> None:
        self.peer = peer
        self.watch = PeerWatch[EngineFacts](peer.describe_engine)
        self._vault = vault
        # Least recently used first.
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._opening = asyncio.Lock()
        self._freed = ChangeSignal()
        # The era of the engine in which these are open; all others are closed.
        self._era = -1

    @asynccontextmanager
    async def using(self, weights_id: str) -> AsyncGenerator[None]:
        """Keep weights open during the block. Raises WeightsGone, and the engine's errors."""
        async with self._opening:
            opened = await self._open(self._row_of(weights_id))
            self._opened.move_to_end(weights_id)
            opened.users += 1
        self._vault.note_use(weights_id)
        try:
            yield
        finally:
            opened.users -= 1
            self._freed.notify_all()

    def forget(self, weights_id: str) -> None:
        """Open these weights again before they are used: the engine does not know them."""
        if opened := self._opened.get(weights_id):
            opened.label = _NONE

    async def replace(self, row: WeightsRow) -> None:
        """Let running and later samples use new weights from their next token on."""
        self._vault.weights[row.weights_id] = row
        async with self._opening:
            opened = self._opened.get(row.weights_id)
            if opened is None or self._era != self.watch.era:
                return
            try:
                await self.peer.replace_weights(row.weights_id, _weights_of(row))
            except Unavailable:
                self.watch.note_loss(self._era)
            except Unknown:
                self.forget(row.weights_id)
            else:
                opened.label, opened.folder = row.label, row.folder

    async def close(self, weights_id: str) -> None:
        """Close weights that nobody will use again; an engine that is away has none open."""
        async with self._opening:
            if self._opened.pop(weights_id, None) and self._era == self.watch.era:
                try:
                    await self.peer.close_sampler(weights_id)
                except Unavailable:
                    self.watch.note_loss(self._era)

    def _row_of(self, weights_id: str) -> WeightsRow:
        if row := self._vault.weights.get(weights_id):
            return row
        if not weights_id.startswith(BASE_WEIGHTS + ":"):
            raise WeightsGone(GONE)
        label = weights_id.removeprefix(BASE_WEIGHTS + ":")
        return WeightsRow(weights_id, "", None, label, None, whole=False, size_bytes=0)

    async def _open(self, row: WeightsRow) -> _Opened:
        facts = await self.watch.facts()
        await self._enter_era(facts)
        opened = self._opened.get(row.weights_id)
        if opened and (opened.label, opened.folder) == (row.label, row.folder):
            return opened
        if opened:
            del self._opened[row.weights_id]
            await self.peer.close_sampler(row.weights_id)
        await self._make_room(facts.max_samplers)
        # If this is cancelled the engine may or may not hold them.
        opened = self._opened[row.weights_id] = _Opened(_NONE, None)
        try:
            await self.peer.open_sampler(row.weights_id, _weights_of(row))
        except (OrderRefused, Unavailable):
            del self._opened[row.weights_id]
            raise
        self.watch.note_success(self._era)
        opened.label, opened.folder = row.label, row.folder
        return opened

    async def _enter_era(self, facts: EngineFacts) -> None:
        """Close what the engine holds from before it, or this process, was lost."""
        era = self.watch.era
        if era != self._era:
            self._opened.clear()
            for sampler_id in facts.samplers:
                await self.peer.close_sampler(sampler_id)
            self._era = era

    async def _make_room(self, most: int) -> None:
        while len(self._opened) >= most:
            freed = self._freed.next_change
            idle = next((key for key, each in self._opened.items() if not each.users), None)
            if idle is None:
                await freed.wait()
            else:
                del self._opened[idle]
                await self.peer.close_sampler(idle)


def _weights_of(row: WeightsRow) -> SamplerWeights:
    return SamplerWeights(row.label, row.folder, row.whole)
