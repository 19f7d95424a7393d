"""A worker's statement about its engine is believed only once the engine has shown it (I6)."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import policy_service_pb2
from flotilla_common.rpc import rpc
from flotilla_learner.groups.policy_provenance import Provenance
from flotilla_learner.journal.row_codec import count_fates
from flotilla_learner.journal.store import open_journal
from tests.contract.test_policy_service import attach_request, report
from tests.support.learner import FakeWorker, graded, learner, make_config


@asynccontextmanager
async def updated(
    tmp_path: Path,
) -> AsyncGenerator[tuple[FakeWorker, policy_service_pb2.Update]]:
    """A worker that was given the first policy and has not reported it."""
    async with learner(tmp_path, make_config(tmp_path)) as running:
        worker = FakeWorker(running.address)
        call = worker.policies.Attach(attach_request(worker))
        update = (await asyncio.wait_for(anext(aiter(call)), 10)).update
        worker.policy.CopyFrom(update.policy)
        yield worker, update
        call.cancel()
        await worker.channel.close()


async def fates_in(tmp_path: Path) -> dict[str, int]:
    journal = open_journal(tmp_path / "run")
    try:
        return await journal.run_read(count_fates)
    finally:
        await journal.close()


async def poll_briefly(worker: FakeWorker, **changes: object) -> pb.Lease | None:
    request = pb.LeaseGroupRequest(
        request_id=str(np.random.default_rng().integers(2**62)),
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        holding=worker.policy,
        free_attempts=64,
        tokenizer_digest=b"t" * 32,
    )
    for name, value in changes.items():
        setattr(request, name, value)
    response = await worker.groups.LeaseGroup(request, timeout=1.3)
    return response.lease if response.HasField("lease") else None


async def test_a_claim_to_hold_a_policy_gets_no_lease_before_its_canary_was_right(
    tmp_path: Path,
) -> None:
    async with updated(tmp_path) as (worker, update):
        assert await poll_briefly(worker) is None
        wrong = await worker.policies.ReportPolicy(report(worker, update, logprob=-2.0))
        assert not wrong.accepted
        assert await poll_briefly(worker) is None
        right = await worker.policies.ReportPolicy(report(worker, update, logprob=-1.0))
        assert right.accepted
        assert await poll_briefly(worker) is not None


async def test_a_wrong_canary_ends_the_workers_leases(tmp_path: Path) -> None:
    async with updated(tmp_path) as (worker, update):
        await worker.policies.ReportPolicy(report(worker, update, logprob=-1.0))
        lease = await poll_briefly(worker)
        assert lease is not None
        await worker.policies.ReportPolicy(report(worker, update, logprob=-2.0))
        renewal = pb.RenewLeasesRequest(worker_id="w0", lease_ids=[lease.lease_id])
        answer = await worker.groups.RenewLeases(renewal)
        assert answer.lost_lease_ids == [lease.lease_id]
        assert await poll_briefly(worker) is None


async def test_a_claimed_policy_is_sent_again_when_it_was_not_shown(tmp_path: Path) -> None:
    async with learner(tmp_path, make_config(tmp_path)) as running:
        worker = FakeWorker(running.address)
        first = worker.policies.Attach(attach_request(worker))
        update = (await asyncio.wait_for(anext(aiter(first)), 10)).update
        first.cancel()
        request = attach_request(worker)
        request.holding.CopyFrom(update.policy)
        again = worker.policies.Attach(request)
        assert (await asyncio.wait_for(anext(aiter(again)), 10)).update.policy == update.policy
        again.cancel()
        await worker.channel.close()


async def test_an_engine_that_was_refused_loads_again_though_its_stream_was_cut_meanwhile(
    tmp_path: Path,
) -> None:
    """It claims to hold the policy that was found to be wrong."""
    async with updated(tmp_path) as (worker, update):
        assert not update.reload
        await worker.policies.ReportPolicy(report(worker, update, logprob=-1.0))
        await worker.policies.ReportPolicy(report(worker, update, logprob=-2.0))
        request = attach_request(worker)
        request.holding.CopyFrom(update.policy)
        again = worker.policies.Attach(request)
        repeated = (await asyncio.wait_for(anext(aiter(again)), 10)).update
        assert (repeated.policy, repeated.reload) == (update.policy, True)
        again.cancel()


async def test_a_trajectory_may_overtake_the_report_on_its_policy(tmp_path: Path) -> None:
    """An engine samples from new weights before the learner has received its report."""
    config = make_config(tmp_path, steps=4, max_staleness=1)
    async with learner(tmp_path, config) as running:
        worker = FakeWorker(running.address, delay_s=0.02, report_delay_s=0.15)
        async with worker.working():
            await asyncio.wait_for(running.task, 20)
    fates = await fates_in(tmp_path)
    assert fates["trained"] == 4 * 3 * 2
    assert "dropped/unverified_policy" not in fates


async def test_what_a_policy_wrote_that_was_never_shown_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Provenance, "report_grace_s", 0.1)
    config = make_config(tmp_path, steps=2, groups_per_step=1)
    async with learner(tmp_path, config) as running:
        worker = FakeWorker(running.address)
        stream = worker.policies.Attach(attach_request(worker))
        updates = aiter(stream)
        first = (await asyncio.wait_for(anext(updates), 10)).update
        await worker.policies.ReportPolicy(report(worker, first, logprob=-1.0))
        worker.policy.CopyFrom(first.policy)
        leases = [await poll_briefly(worker) for _ in range(2)]
        assert leases[0] and leases[1]
        for attempt in leases[0].attempts:
            await worker.submit(graded(leases[0], attempt, first.policy))
        second = (await asyncio.wait_for(anext(updates), 10)).update
        await worker.submit(graded(leases[1], leases[1].attempts[0], second.policy))
        stream.cancel()
        await worker.channel.close()
    fates = await fates_in(tmp_path)
    assert fates == {"trained": 2, "dropped/unverified_policy": 1, "acknowledged": 3}


async def test_a_process_that_was_replaced_gets_nothing_any_more(tmp_path: Path) -> None:
    async with updated(tmp_path) as (worker, update):
        old = worker.incarnation
        await worker.policies.ReportPolicy(report(worker, update, logprob=-1.0))
        assert await poll_briefly(worker) is not None
        assert await poll_briefly(worker, incarnation="successor") is None
        assert await poll_briefly(worker, incarnation=old) is None
        zombie = worker.policies.Attach(attach_request(worker, incarnation=old))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(zombie))
        refusal = rpc.service_error(caught.value)
        assert refusal is not None
        assert refusal.reason == "UNKNOWN_WORKER"
