"""Differences between publications, for workers that hold an older one; `weight_server.py` sends
them."""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.weights.weight_delta import (
    BLOCK_BYTES,
    Change,
    DamagedDeltaError,
    encode_change,
    undo_change,
)
from flotilla_learner.weights.weight_snapshots import SnapshotCache, WeightSnapshot

# A worker further behind than this fetches everything; this many publications after the last
# request, differences are no longer made ahead.
_KEPT = 4
# Share of a publication's bytes that all differences together may take, except the newest.
_MEMORY_SHARE = 0.5
_BEHIND_OTHERS = 10


class WeightDelta:
    """Difference of two successive publications, in blocks that are encoded in order.

    Both publications are read while they are held. A block read too late is unavailable, as is one
    in which too much has changed."""

    def __init__(self, older: WeightSnapshot, newer: WeightSnapshot) -> None:
        self.older, self.newer = older, newer
        self.size_bytes = 0
        self._blocks: list[Change | None] = []
        self._ended = False
        self._grown = asyncio.Condition()

    async def encode_blocks(self, shelf: SnapshotCache, thread: ThreadPoolExecutor) -> None:
        """Encode all blocks in order, until one of the publications is superseded."""
        loop, paths = asyncio.get_running_loop(), (self.older.path, self.newer.path)
        try:
            for start in range(0, self.newer.total_bytes, BLOCK_BYTES):
                block = await loop.run_in_executor(thread, _encode_block, *paths, start)
                # Checked after the read, because a superseded file is rewritten.
                if not shelf.holds(self.older):
                    break
                self._blocks.append(block)
                self.size_bytes += block.size_bytes if block else 0
                await self._wake_readers()
        finally:
            self._ended = True
            await self._wake_readers()

    async def read_block(self, index: int) -> Change | None:
        """Return a block as soon as it is encoded; None if it must be sent whole."""
        async with self._grown:
            await self._grown.wait_for(lambda: self._ended or index < len(self._blocks))
        return self._blocks[index] if index < len(self._blocks) else None

    async def _wake_readers(self) -> None:
        async with self._grown:
            self._grown.notify_all()


class DeltaShelf:
    """Differences of the newest publications, each made once, in one low-priority thread."""

    def __init__(self, snapshots: SnapshotCache) -> None:
        self._snapshots = snapshots
        self._deltas: list[WeightDelta] = []
        self._making = BackgroundTasks()
        self._thread = ThreadPoolExecutor(1, initializer=_stand_behind)
        # Publications until differences are no longer made ahead.
        self._awaited = 0

    def note_announced(self) -> None:
        """Make the newest difference if workers have requested differences."""
        if self._awaited:
            self._awaited -= 1
            self._make_newest()

    def find_deltas(self, held: bytes, wanted: WeightSnapshot) -> "tuple[WeightDelta, ...] | None":
        """Return the differences from the publication of fingerprint `held` to `wanted`, in order;
        None if they are not known."""
        self._awaited = _KEPT
        self._make_newest()
        found: list[WeightDelta] = []
        reached = wanted.fingerprint
        for delta in reversed(self._deltas):
            if reached == held:
                break
            if delta.newer.fingerprint == reached:
                found.insert(0, delta)
                reached = delta.older.fingerprint
        return tuple(found) if reached == held else None

    def _make_newest(self) -> None:
        pair = self._snapshots.newest_pair()
        if pair is None or pair[0].total_bytes != pair[1].total_bytes:
            return
        if any((delta.older, delta.newer) == pair for delta in self._deltas):
            return
        self._drop_oldest(pair[1].total_bytes)
        delta = WeightDelta(*pair)
        self._deltas.append(delta)
        self._making.start_task(delta.encode_blocks(self._snapshots, self._thread))

    def _drop_oldest(self, total_bytes: int) -> None:
        def too_many() -> bool:
            used = sum(delta.size_bytes for delta in self._deltas)
            return len(self._deltas) >= _KEPT or used > _MEMORY_SHARE * total_bytes

        while self._deltas and too_many():
            del self._deltas[0]


async def read_change(deltas: Sequence[WeightDelta], path: str, index: int) -> bytes | None:
    """Return block `index` of successive differences, which lead to the publication at `path`, as
    one; None if any of them lacks it."""
    blocks = [await delta.read_block(index) for delta in deltas]
    present = [block for block in blocks if block is not None]
    if len(present) < len(blocks):
        return None
    if len(present) == 1:
        return present[0].data
    return await asyncio.to_thread(_add_up, path, index * BLOCK_BYTES, present)


def _add_up(path: str, start: int, changes: Sequence[Change]) -> bytes | None:
    try:
        old = new = np.fromfile(path, np.uint8, BLOCK_BYTES, offset=start)
        for change in reversed(changes):
            old = undo_change(old, change)
    # Removed or rewritten: the publication is superseded.
    except (OSError, DamagedDeltaError):
        return None
    total = encode_change(new, old)
    return total.data if total is not None else None


def _encode_block(older: str, newer: str, start: int) -> Change | None:
    try:
        old = np.fromfile(older, np.uint8, BLOCK_BYTES, offset=start)
        new = np.fromfile(newer, np.uint8, BLOCK_BYTES, offset=start)
    except OSError:
        # Removed by a learner that ends or has restarted.
        return None
    if old.size != new.size:
        return None
    return encode_change(new, old)


def _stand_behind() -> None:
    """Yield the processors to all other work: the next step, and other streams."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND_OTHERS)
