"""Shared memory and WeightService: from the parameters to a worker's checked file."""

import mmap
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.weight_sync.publication import (
    Clock,
    PublishedModel,
    announced,
    cpu_of,
    median_ratio,
    per_gb,
    policy_of,
)
from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc import rpc
from flotilla_common.weights.fingerprint import TokenizerDigests, checksum64
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.weight_server import WeightServerConfig
from flotilla_rollout.adapters.learner_calls import RunEpoch, WorkerIdentity
from flotilla_rollout.adapters.policy_feed import PolicyClient
from flotilla_rollout.types import FetchedPart, Publication
from flotilla_rollout.work.weight_staging import stage_weights

TOKEN = "a-token-of-the-benchmark"


class CountingFeed(PolicyClient):
    """Weight client of a worker that counts the fetched bytes."""

    fetched_bytes = 0

    async def fetch_weights(
        self, publication: Publication, offset: int, held: PolicyId | None = None
    ) -> AsyncGenerator[FetchedPart]:
        async for part in super().fetch_weights(publication, offset, held):
            self.fetched_bytes += len(part.data)
            yield part


async def compare_shared_memory(
    published: PublishedModel, folder: Path, pairs: int
) -> dict[str, Any]:
    """Return CPU of publishing and loading over that of copies and checksums, after a warm-up."""
    found: dict[str, list[float]] = {side: [] for side in ("publish", "load", "plain")}
    async with connected(None) as feed:
        for _ in range(pairs + 1):
            clock = Clock()
            written = published.write_next()
            found["publish"].append(clock.cpu_s)
            clock = Clock()
            update = announced(written, "shm", str(written.path))
            await stage_weights(update, feed, folder / "staged")
            found["load"].append(clock.cpu_s)
            (folder / "staged").unlink()
            found["plain"].append(copy_and_check(written.path, folder / "copied"))
    warm = {side: values[1:] for side, values in found.items()}
    both = [sum(pair) for pair in zip(warm["publish"], warm["load"], strict=True)]
    return {
        "cpu_over_copy_and_checksum": median_ratio(both, warm["plain"]),
        **{side: median_ratio(warm[side], warm["plain"]) for side in ("publish", "load")},
        "cpu_s_per_gb": {
            side: per_gb(values, published.total_bytes) for side, values in warm.items()
        },
    }


def copy_and_check(source: Path, target: Path) -> float:
    """Copy a file within shared memory and check the copy; return the CPU seconds."""
    data = np.fromfile(source, dtype=np.uint8)
    clock = Clock()
    with target.open("w+b") as file:
        file.truncate(data.size)
        with mmap.mmap(file.fileno(), data.size) as mapped:
            copy = np.frombuffer(mapped, np.uint8)
            copy[:] = data
            checksum64(copy)
            del copy
    used = clock.cpu_s
    target.unlink()
    return used


async def measure_grpc(published: PublishedModel, folder: Path, pairs: int) -> dict[str, Any]:
    """Return CPU seconds per GB of both sides of WeightService, after a warm-up."""
    server = PublicationChild("flotilla_learner.weights.weight_server", folder / "server.log")
    found: dict[str, list[float]] = {"sender": [], "receiver": []}
    try:
        address = await server.start_process(WeightServerConfig("run", TOKEN))
        [process] = psutil.Process().children()
        async with connected(address) as feed:
            for _ in range(pairs + 1):
                written = published.write_next()
                await server.serve_publication(written, policy_of(written))
                before, clock = cpu_of([process]), Clock()
                update = announced(written, "grpc", address)
                await stage_weights(update, feed, folder / "staged")
                found["receiver"].append(clock.cpu_s)
                found["sender"].append(cpu_of([process]) - before)
                (folder / "staged").unlink()
    finally:
        await server.close()
    return {
        f"{side}_cpu_s_per_gb": per_gb(values[1:], published.total_bytes)
        for side, values in found.items()
    }


@asynccontextmanager
async def connected(address: str | None) -> AsyncGenerator[CountingFeed]:
    """Make a worker's weight client; `address` is its learner's, if it needs one."""
    identity = WorkerIdentity("worker", "incarnation", 1, TokenizerDigests(b"tokenizer"))
    open_channel: Callable[[str], Any] = lambda there: rpc.channel(there, token=TOKEN)  # noqa: E731
    async with open_channel(address or "127.0.0.1:1") as channel:
        yield CountingFeed(channel, identity, RunEpoch(), weights=open_channel)
