"""Unfinished submissions: without a lease they are refused at the header, stalled ones lose
their place, and those that wait for room are not read."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from tests.support.learner import (
    FakeWorker,
    Submission,
    graded,
    learner,
    make_config,
    make_turns,
)

Stream = grpc.aio.StreamUnaryCall


@asynccontextmanager
async def attached(tmp_path: Path, **intake: float) -> AsyncGenerator[FakeWorker]:
    """A worker that follows the policy and does nothing on its own."""
    config = make_config(tmp_path, lease_ttl_s=60.0, intake=intake)
    async with learner(tmp_path, config) as running:
        worker = FakeWorker(running.address)
        following = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 60)
        yield worker
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await worker.channel.close()


async def submission(worker: FakeWorker, attempt: int = 0) -> Submission:
    lease = await worker.poll()
    assert lease is not None
    return graded(lease, lease.attempts[attempt], worker.policy, reward=1.0)


def begun(worker: FakeWorker, made: Submission, *, sent: int, on: asyncio.Event) -> Stream:
    """A call that brings the first messages at once, and the others when `on` is set."""

    async def parts() -> AsyncIterator[pb.SubmitTrajectoryRequest]:
        count = 0
        async for part in made.parts():
            if count == sent:
                await on.wait()
            yield part
            count += 1
        if count == sent:
            await on.wait()

    return worker.groups.SubmitTrajectory(parts(), timeout=10)


async def refusal_of(call: Stream) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = rpc.service_error(caught.value)
    assert error is not None
    return error


async def test_what_has_no_lease_is_refused_at_its_header(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        made, never = await submission(worker), asyncio.Event()
        good = made.header.lease_id
        made.header.lease_id = "no-such-lease"
        refused = await asyncio.wait_for(refusal_of(begun(worker, made, sent=1, on=never)), 3)
        assert refused.reason == "LEASE_LOST"
        made.header.lease_id, made.header.worker_id = good, "another-worker"
        refused = await asyncio.wait_for(refusal_of(begun(worker, made, sent=1, on=never)), 3)
        assert refused.reason == "LEASE_LOST"
        assert "another worker's" in refused.message
        # The lease itself is still good.
        assert not (await worker.submit(made)).repeated_submission


@pytest.mark.parametrize("sent", [0, 1, 2], ids=["no header", "the header", "a chunk"])
async def test_a_submission_that_stands_still_is_ended_and_may_be_sent_again(
    tmp_path: Path, sent: int
) -> None:
    # The repeated parts must not stall for so long on a busy machine.
    async with attached(tmp_path, stall_s=1.0) as worker:
        made = await submission(worker)
        refused = await refusal_of(begun(worker, made, sent=sent, on=asyncio.Event()))
        assert (refused.code, refused.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "STREAM_STALLED",
        )
        assert refused.retry_delay_s is not None
        # Of the same attempt.
        assert not (await worker.submit(made)).repeated_submission


async def test_a_lease_that_is_lost_on_the_way_ends_its_submission(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        made, on = await submission(worker), asyncio.Event()
        call = asyncio.ensure_future(refusal_of(begun(worker, made, sent=1, on=on)))
        await asyncio.sleep(0.2)
        release = pb.ReleaseLeasesRequest(
            worker_id=worker.worker_id, lease_ids=[made.header.lease_id]
        )
        await worker.groups.ReleaseLeases(release, timeout=5)
        on.set()
        assert (await call).reason == "LEASE_LOST"


def large(made: Submission, tokens: int) -> Submission:
    """Add this many tokens by the environment to a submission."""
    sequence = made.header.sequences[0]
    sequence.spans.authors.append(trajectory_pb2.AUTHOR_ENVIRONMENT)
    sequence.spans.lengths.append(tokens)
    sequence.token_count += tokens
    made.token_ids[0] += bytes(4 * tokens)
    return made


async def test_what_finds_no_room_waits_and_then_comes_in(tmp_path: Path) -> None:
    # A header announces many sequences, each of as many tokens as a model takes here.
    async with attached(tmp_path, worker_bytes=2**20, total_bytes=2**20, stall_s=20.0) as worker:
        lease = await worker.poll()
        assert lease is not None
        first, second = (
            large(graded(lease, attempt, worker.policy, reward=1.0), 100)
            for attempt in lease.attempts
        )
        # 1,040 sequences would be too many: the headers alone fill the room.
        for made in (first, second):
            made.header.turns.CopyFrom(make_turns(2000))
            made.header.checks_passed.extend(["x" * 100] * 600)
        on = asyncio.Event()
        held = begun(worker, first, sent=1, on=on)
        await asyncio.sleep(0.3)
        waiting = asyncio.ensure_future(worker.submit(second))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        on.set()
        assert not (await held).repeated_submission
        assert (await waiting).group_complete


async def test_a_repeat_of_what_is_journaled_needs_no_lease(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        made = await submission(worker)
        await worker.submit(made)
        release = pb.ReleaseLeasesRequest(
            worker_id=worker.worker_id, lease_ids=[made.header.lease_id]
        )
        await worker.groups.ReleaseLeases(release, timeout=5)
        assert (await worker.submit(made)).repeated_submission
        made.digest = hashlib.sha256(b"other").digest()
        with pytest.raises(grpc.aio.AioRpcError):
            await worker.submit(made)
