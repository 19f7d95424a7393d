"""Pictures reach the learner once for each group and run epoch, and again if it has lost them."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey, StopReason
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import (
    Media,
    Trajectory,
    content_digest,
)
from flotilla_common.domain.trajectory import (
    Sequence as Sampled,
)
from flotilla_common.images.picture import Picture
from flotilla_common.images.placeholders import expand_pictures
from flotilla_common.rpc import rpc
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_common.wire.policy import decode_policy
from flotilla_rollout.adapters import learner as adapter
from flotilla_rollout.adapters.learner import GroupClient
from flotilla_rollout.adapters.learner_calls import RunEpoch, WorkerIdentity
from flotilla_rollout.ports import LearnerRefused
from flotilla_rollout.types import Lease
from tests.learner.run.test_train_loop import query
from tests.support.learner import TOKEN, TOKENIZER, FakeWorker, learner, make_config
from tests.support.pictures import FAMILY, draw_picture

SCREEN, OTHER = draw_picture(1), draw_picture(2)


@dataclass
class Player:
    """A rollout's client of a learner, and the pictures of each submission that it sends."""

    client: GroupClient
    worker: FakeWorker
    sent: list[list[str]]

    async def lease(self) -> Lease:
        policy = decode_policy(self.worker.policy)
        found = await self.client.lease_group(policy, 64)
        assert found is not None
        return found

    async def submit(self, lease: Lease, index: int, pictures: Sequence[Picture]) -> bool:
        made = played(lease, index, self.worker, pictures)
        return await self.client.submit_trajectory(lease, made, 10.0)


def played(lease: Lease, index: int, worker: FakeWorker, pictures: Sequence[Picture]) -> Trajectory:
    """An attempt that shows pictures in its prompt, and answers with two tokens."""
    pads = [t for _ in pictures for t in (FAMILY.vision_start, FAMILY.image_pad, FAMILY.vision_end)]
    prompt, shown = expand_pictures([1, *pads], pictures, FAMILY)
    policy = decode_policy(worker.policy)
    spans = (
        Span(Author.PROMPT, len(prompt)),
        Span(Author.POLICY, 2, policy, lease.temperature),
    )
    media = tuple(
        Media(
            *(s.picture.sha256, s.picture.mime, s.place.grid, s.place.offset),
            *(FAMILY.processor_digest, len(s.picture.data)),
        )
        for s in shown
    )
    ids = np.append(prompt, [2, 3]).astype(np.int32)
    sequence = Sampled(ids, spans, np.array([-1, -1], np.float32), media)
    return Trajectory(
        *(AttemptKey(lease.group_id, index, 0), "", (sequence,), content_digest([sequence])),
        reward=float(index),
        stop_reason=StopReason.DONE,
        pictures={each.sha256: each.data for each in pictures},
    )


@asynccontextmanager
async def playing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[list[str]] | None = None
) -> AsyncGenerator[Player]:
    """A learner, and a rollout that serves its policy."""
    noted: list[list[str]] = [] if sent is None else sent
    encode = adapter.encode_submission

    def note(trajectory: Trajectory):
        noted.append([*trajectory.pictures])
        return encode(trajectory)

    monkeypatch.setattr(adapter, "encode_submission", note)
    config = make_config(tmp_path, group_size=3, lease_ttl_s=60.0)
    async with learner(tmp_path, config, vision=FAMILY) as running:
        worker = FakeWorker(running.address)
        attached = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 10)
        identity = WorkerIdentity(
            worker.worker_id, worker.incarnation, 1, TokenizerDigests(TOKENIZER)
        )
        async with rpc.channel(running.address, token=TOKEN) as channel:
            yield Player(GroupClient(channel, identity, RunEpoch()), worker, noted)
        attached.cancel()
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()


async def test_a_picture_is_sent_once_for_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(tmp_path, monkeypatch) as player:
        first, second = await player.lease(), await player.lease()
        await player.submit(first, 0, [SCREEN])
        await player.submit(first, 1, [SCREEN, OTHER])
        await player.submit(second, 0, [SCREEN])
        assert await player.submit(first, 2, [OTHER, SCREEN])
    a, b = SCREEN.sha256, OTHER.sha256
    assert player.sent == [[a], [b], [a], []]
    assert sorted(query(tmp_path, "SELECT group_id, sha256 FROM pictures")) == sorted(
        [(first.group_id, a), (first.group_id, b), (second.group_id, a)]
    )


async def test_all_pictures_are_sent_again_if_the_learner_lacks_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(tmp_path, monkeypatch) as player:
        lease = await player.lease()
        await player.submit(lease, 0, [SCREEN, OTHER])
        with closing(sqlite3.connect(tmp_path / "run" / JOURNAL_FILE)) as db:
            db.execute("DELETE FROM pictures WHERE sha256 = ?", (OTHER.sha256,))
            db.commit()
        await player.submit(lease, 1, [SCREEN, OTHER])
        assert query(tmp_path, "SELECT count(*) FROM trajectories") == [(2,)]
        assert query(tmp_path, "SELECT count(*) FROM pictures") == [(2,)]
    both = [SCREEN.sha256, OTHER.sha256]
    assert player.sent == [both, [], both]


async def test_a_learner_of_a_new_epoch_is_sent_all_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    for _ in range(2):
        async with playing(tmp_path, monkeypatch, sent) as player:
            lease = await player.lease()
            await player.submit(lease, lease.attempts[0].attempt_index, [SCREEN])
        monkeypatch.undo()
    assert sent == [[SCREEN.sha256]] * 2


async def test_a_trajectory_whose_picture_does_not_come_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(tmp_path, monkeypatch) as player:
        lease = await player.lease()
        made = replace(played(lease, 0, player.worker, [SCREEN]), pictures={})
        with pytest.raises(LearnerRefused, match="is not journaled for group"):
            await player.client.submit_trajectory(lease, made, 10.0)
    assert player.sent == [[]]
