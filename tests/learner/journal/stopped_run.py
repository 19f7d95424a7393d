"""A run that stopped as `kill -9` stops one, to be damaged: its write-ahead log is still there."""

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flotilla.learner.v1 import group_service_pb2 as pb
from tests.learner.run.test_train_loop import following, lease_for, rows_of
from tests.support.learner import FakeWorker

STEPS, PLAYED = 9, 5
EVERY = 2
ENOUGH: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every": EVERY}}


async def stopped_run(folder: Path) -> None:
    """Train five of nine steps in `folder`/run, with checkpoints at 2 and 4, and begin a sixth."""
    live = folder / "live"
    live.mkdir()
    async with following(live, **ENOUGH) as worker:
        for step in range(1, PLAYED + 1):
            for _ in range(3):
                await _play(worker)
            await rows_of(live, f"SELECT * FROM plans WHERE step = {step}")
        await _play(worker)
        await _quiet(live / "run")
        shutil.copytree(live / "run", folder / "run")


async def _play(worker: FakeWorker) -> None:
    await worker.play(await lease_for(worker, pb.PURPOSE_TRAIN))


async def _quiet(run_dir: Path) -> None:
    """Wait until nothing is written: a copy then equals the files after a kill."""
    files = [run_dir / "journal.sqlite-wal", run_dir / "metrics.jsonl"]
    seen: list[bytes] = []
    while (found := [path.read_bytes() for path in files]) != seen:
        seen = found
        await asyncio.sleep(0.3)


def flip(data: bytes, chooser: random.Random) -> bytes:
    changed = bytearray(data)
    changed[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
    return bytes(changed)


def cut(data: bytes, chooser: random.Random) -> bytes:
    return data[: chooser.randrange(1, len(data))]


def torn(data: bytes, chooser: random.Random) -> bytes:
    """Zeroes from somewhere on, as of blocks that were never written."""
    keep = chooser.randrange(1, len(data))
    return data[:keep] + bytes(len(data) - keep)


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "one bit": flip,
    "cut": cut,
    "torn": torn,
}


def damage(path: Path, kind: str, chooser: random.Random) -> None:
    """Do it to a file; `removed` is a kind of its own."""
    if kind == "removed":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes(), chooser))
