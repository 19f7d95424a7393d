"""Trajectories that must not be believed, over a real socket: each is refused with a status that
gives the reason, none reaches the journal, and the group still takes a good one afterwards."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.rpc import rpc
from tests.contract.spoiled import CASES, INVALID, Spoil, only_the_prompt
from tests.support.learner import FakeWorker, Submission, graded, learner, make_config

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Desk:
    """A learner, and a worker that does nothing on its own."""

    folder: Path
    worker: FakeWorker

    async def lease(self) -> pb.Lease:
        lease = await self.worker.poll()
        assert lease is not None
        return lease

    def graded(self, lease: pb.Lease) -> Submission:
        return graded(lease, lease.attempts[0], self.worker.policy)

    @property
    def journaled(self) -> int:
        """Trajectories in the file itself."""
        return journaled(self.folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Desk]:
    """One learner for all cases: no case changes anything."""
    folder = tmp_path_factory.mktemp("desk")
    config = make_config(folder, groups_per_step=128, lease_ttl_s=60.0)
    async with learner(folder, config) as running:
        worker = FakeWorker(running.address)
        following = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 60)
        yield Desk(folder, worker)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await worker.channel.close()


def journaled(tmp_path: Path) -> int:
    with closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite")) as db:
        (count,) = db.execute("SELECT count(*) FROM trajectories").fetchone()
    return count


async def status_of(worker: FakeWorker, submission: Submission) -> tuple[str, str]:
    """Code and reason of the refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.submit(submission)
    error = rpc.service_error(caught.value)
    return caught.value.code().name, error.reason if error else ""


@pytest.mark.parametrize(("name", "spoil", "expected"), CASES, ids=[case[0] for case in CASES])
async def test_a_bad_trajectory_is_refused_and_changes_nothing(
    desk: Desk, name: str, spoil: Spoil, expected: tuple[str, str]
) -> None:
    lease = await desk.lease()
    before = desk.journaled
    bad = desk.graded(lease)
    spoil(bad)
    assert await status_of(desk.worker, bad) == expected
    assert desk.journaled == before
    receipt = await desk.worker.submit(desk.graded(lease))
    assert not receipt.repeated_submission
    assert desk.journaled == before + 1


async def test_other_content_under_a_key_that_is_journaled_is_refused(desk: Desk) -> None:
    """B26."""
    lease = await desk.lease()
    first = graded(lease, lease.attempts[0], desk.worker.policy, reward=1.0)
    await desk.worker.submit(first)
    before = desk.journaled
    other = graded(lease, lease.attempts[0], desk.worker.policy, reward=0.0)
    assert await status_of(desk.worker, other) == ("ALREADY_EXISTS", "CONTENT_CONFLICT")
    assert desk.journaled == before
    assert (await desk.worker.submit(first)).repeated_submission


async def test_a_prompt_that_leaves_the_policy_no_room_is_a_grade_like_any_other(
    desk: Desk,
) -> None:
    lease = await desk.lease()
    submission = desk.graded(lease)
    only_the_prompt(submission)
    submission.header.stop_reason = trajectory_pb2.STOP_REASON_CONTEXT_OVERFLOW
    await desk.worker.submit(submission)


Parts = Sequence[pb.SubmitTrajectoryRequest]


async def parts_of(submission: Submission) -> list[pb.SubmitTrajectoryRequest]:
    return [part async for part in submission.parts()]


STREAMS: list[tuple[str, Callable[[Parts], Parts]]] = [
    ("nothing at all", lambda parts: []),
    ("no header", lambda parts: parts[1:]),
    ("two headers", lambda parts: [parts[0], *parts]),
    ("no chunk", lambda parts: parts[:1]),
    ("a chunk too many", lambda parts: [*parts, parts[1]]),
    ("an empty message", lambda parts: [pb.SubmitTrajectoryRequest(), *parts]),
    ("an empty chunk", lambda parts: [parts[0], chunk(b""), *parts[1:]]),
    ("a chunk of a sequence that is not there", lambda parts: [parts[0], chunk(b"1234", 7)]),
]


def chunk(ids: bytes, sequence: int = 0) -> pb.SubmitTrajectoryRequest:
    part = trajectory_pb2.SequenceChunk(sequence_index=sequence, token_ids=ids)
    return pb.SubmitTrajectoryRequest(chunk=part)


async def sent(parts: Parts) -> AsyncIterator[pb.SubmitTrajectoryRequest]:
    for part in parts:
        yield part


@pytest.mark.parametrize(("name", "spoil"), STREAMS, ids=[case[0] for case in STREAMS])
async def test_a_stream_out_of_order_is_refused_and_changes_nothing(
    desk: Desk, name: str, spoil: Callable[[Parts], Parts]
) -> None:
    lease = await desk.lease()
    before = desk.journaled
    parts = spoil(await parts_of(desk.graded(lease)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await desk.worker.groups.SubmitTrajectory(sent(parts), timeout=10)
    error = rpc.service_error(caught.value)
    assert error is not None
    assert (caught.value.code().name, error.reason) == INVALID
    assert desk.journaled == before


async def test_a_flood_is_cut_off_at_what_its_header_announced(desk: Desk) -> None:
    """The learner keeps no more than 8 bytes for each token that the header names, and does not
    read the excess to its end."""
    lease = await desk.lease()
    header = (await parts_of(desk.graded(lease)))[0]

    async def flood() -> AsyncIterator[pb.SubmitTrajectoryRequest]:
        yield header
        yield chunk(b"\0" * 2**20)
        await asyncio.Event().wait()

    before = desk.journaled
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await desk.worker.groups.SubmitTrajectory(flood(), timeout=10)
    error = rpc.service_error(caught.value)
    assert error is not None
    assert (caught.value.code().name, error.reason) == INVALID
    assert "more than the header announced" in error.message
    assert desk.journaled == before


async def test_a_worker_that_is_refused_while_it_writes_hears_why(desk: Desk) -> None:
    lease = await desk.lease()
    header = (await parts_of(desk.graded(lease)))[0]
    parts = [header, *[chunk(b"\0" * 2**20)] * 24]
    for _ in range(10):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await desk.worker.groups.SubmitTrajectory(sent(parts), timeout=10)
        error = rpc.service_error(caught.value)
        assert error is not None, caught.value.details()
        assert (caught.value.code().name, error.reason) == INVALID
