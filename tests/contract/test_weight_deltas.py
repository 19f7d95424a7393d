"""Differences of weights that a worker fetches from the real server in a process of its own: it
stages exactly what was published, whatever it held and whatever happened on the way."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import REGISTRY

from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc import rpc
from flotilla_common.weights.fingerprint import (
    TensorEntry,
    TokenizerDigests,
    checksum64,
    compute_fingerprint,
)
from flotilla_learner.types import Publication as Written
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.weight_server import WeightServerConfig
from flotilla_rollout.adapters.learner_calls import RunEpoch, WorkerIdentity
from flotilla_rollout.adapters.policy_feed import PolicyClient
from flotilla_rollout.types import FetchedPart, Publication
from flotilla_rollout.work.weight_staging import KeptWeights, stage_weights

TOKEN = "a-token-of-this-test"
# Neither a whole number of blocks nor of words.
TOTAL = 3 * 2**20 + 17
IDENTITY = WorkerIdentity("rollout-0", "incarnation", 1, TokenizerDigests(b"d" * 32))


class CountingFeed(PolicyClient):
    """Counts the bytes that come, and damages a difference on request."""

    fetched = 0
    damage = 0

    async def fetch_weights(
        self, publication: Publication, offset: int, held: PolicyId | None = None
    ) -> AsyncGenerator[FetchedPart]:
        async for part in super().fetch_weights(publication, offset, held):
            self.fetched += len(part.data)
            if self.damage and part.delta_bytes:
                self.damage -= 1
                damaged = bytearray(part.data)
                damaged[-1] ^= 1
                part = replace(part, data=bytes(damaged))
            yield part


class Run:
    """A run's published words, the server that has them, and the address it is at."""

    def __init__(self, folder: Path, server: PublicationChild, address: str) -> None:
        self._folder = folder
        self._server = server
        self._address = address
        self._numbers = np.random.default_rng(0)
        self._version = -1
        self.words = self._numbers.integers(0, 2**16, TOTAL // 2 + 1, dtype=np.uint16)

    @property
    def data(self) -> bytes:
        return self.words.tobytes()[:TOTAL]

    async def publish(self, changed: float = 0.02) -> Publication:
        """Publish words of which this many have changed by one."""
        where = self._numbers.random(self.words.size) < changed
        self.words = self.words + where.astype(np.uint16)
        self._version += 1
        path = self._folder / f"slot{self._version % 3}"
        path.write_bytes(self.data)
        data = np.frombuffer(self.data, np.uint8)
        entry = TensorEntry("w", "uint8", (TOTAL - 64,), 64, checksum64(data[64:]))
        policy = PolicyId(1, self._version, compute_fingerprint([entry], TOTAL))
        nothing = np.zeros(0, np.float32)
        fields = (self._version, policy.fingerprint, (entry,), TOTAL, path)
        tokens = np.zeros(0, np.int32)
        await self._server.serve_publication(Written(*fields, tokens, nothing), policy)
        where_to = ("grpc", self._address)
        return Publication(policy, (entry,), TOTAL, *where_to, tokens, 60.0, keep=True)


class Fetcher:
    """The part of a worker that stages and keeps weights."""

    def __init__(self, folder: Path, address: str) -> None:
        self._staged = folder / "staged"
        self.kept = KeptWeights(folder / "kept")
        channel = partial(rpc.channel, token=TOKEN)
        self._channel = channel(address)
        self.feed = CountingFeed(self._channel, IDENTITY, RunEpoch(), weights=channel)

    async def close(self) -> None:
        await self._channel.close()

    async def fetch(self, publication: Publication) -> tuple[bytes, float]:
        """Return what is staged, and the share of its bytes that were sent for it."""
        self.feed.fetched = 0
        await stage_weights(publication, self.feed, self._staged, self.kept)
        staged = self._staged.read_bytes()
        self.kept.replace_by(publication, self._staged)
        return staged, self.feed.fetched / TOTAL


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncGenerator[tuple[Run, Fetcher]]:
    server = PublicationChild("flotilla_learner.weights.weight_server", folder / "weights.log")
    config = WeightServerConfig("run", TOKEN, **options)
    address = await server.start_process(config)
    fetcher = Fetcher(folder, address)
    try:
        yield Run(folder, server, address), fetcher
    finally:
        await fetcher.close()
        await server.close()


def fetches(how: str) -> float:
    return REGISTRY.get_sample_value("flotilla_weight_fetches_total", {"how": how}) or 0.0


async def test_a_worker_that_holds_weights_fetches_what_has_changed_since(tmp_path: Path) -> None:
    async with serving(tmp_path) as (run, fetcher):
        before = fetches("delta")
        assert await fetcher.fetch(await run.publish()) == (run.data, 1.0)
        for _ in range(4):
            staged, share = await fetcher.fetch(await run.publish())
            assert staged == run.data
            assert share < 0.03
        assert fetches("delta") == before + 4


async def test_a_worker_that_has_skipped_versions_fetches_their_changes_as_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "slow").mkdir()
    async with serving(tmp_path) as (run, fetcher):
        slow = Fetcher(tmp_path / "slow", "127.0.0.1:1")
        first = await run.publish()
        await slow.fetch(first)
        await fetcher.fetch(first)
        for _ in range(3):
            # Read to its end, and so made to its end before the next one.
            await fetcher.fetch(await run.publish())
        newest = await run.publish()
        staged, share = await slow.fetch(newest)
        assert staged == run.data
        assert share < 0.09
        await slow.close()


async def test_weights_that_nothing_leads_from_are_sent_whole(tmp_path: Path) -> None:
    async with serving(tmp_path) as (run, fetcher):
        for _ in range(3):
            await run.publish()
        held = await run.publish()
        await fetcher.fetch(held)
        await run.publish()
        newest = await run.publish()
        # No worker fetched while the version between was there.
        assert await fetcher.fetch(newest) == (run.data, 1.0)
        assert fetcher.kept.policy is not None
        fetcher.kept.policy = replace(fetcher.kept.policy, fingerprint=b"another" * 4)
        assert await fetcher.fetch(await run.publish()) == (run.data, 1.0)


async def test_weights_that_changed_in_many_words_are_sent_whole(tmp_path: Path) -> None:
    async with serving(tmp_path) as (run, fetcher):
        await fetcher.fetch(await run.publish())
        assert await fetcher.fetch(await run.publish(changed=0.5)) == (run.data, 1.0)


async def test_where_differences_are_off_all_is_sent(tmp_path: Path) -> None:
    async with serving(tmp_path, delta=False) as (run, fetcher):
        await fetcher.fetch(await run.publish())
        assert await fetcher.fetch(await run.publish()) == (run.data, 1.0)


async def test_weights_that_are_not_trusted_are_fetched_whole(tmp_path: Path) -> None:
    async with serving(tmp_path) as (run, fetcher):
        await fetcher.fetch(await run.publish())
        again = replace(await run.publish(), reload=True, keep=False)
        assert await fetcher.fetch(again) == (run.data, 1.0)
        assert not fetcher.kept.path.exists()


def damage_kept(fetcher: Fetcher, how: str) -> None:
    """Damage the kept weights, or have the feed damage the next difference."""
    if how == "difference":
        fetcher.feed.damage = 1
    elif how == "gone":
        fetcher.kept.path.unlink()
    else:
        held = bytearray(fetcher.kept.path.read_bytes())
        held[2**20 + 5] ^= 1
        fetcher.kept.path.write_bytes(held if how == "kept" else held[: 2**20])


async def test_whatever_is_damaged_is_noticed_and_all_is_fetched(tmp_path: Path) -> None:
    async with serving(tmp_path) as (run, fetcher):
        await fetcher.fetch(await run.publish())
        for damaged in ("difference", "kept", "shortened", "gone"):
            before = fetches("failed")
            damage_kept(fetcher, damaged)
            staged, share = await fetcher.fetch(await run.publish())
            assert staged == run.data, damaged
            assert share > 1.0, damaged
            assert fetches("failed") == before + 1, damaged
            # From here on everything works as before.
            staged, share = await fetcher.fetch(await run.publish())
            assert staged == run.data, damaged
            assert share < 0.03, damaged
