"""GroupService against a real client over a socket."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import policy_pb2, trajectory_pb2
from flotilla_common.rpc import rpc
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_learner.journal.store import open_journal
from tests.support.learner import (
    FakeWorker,
    Submission,
    failed,
    graded,
    learner,
    make_config,
    write_tasks,
)


async def test_a_run_trains_every_step_on_what_its_worker_submits(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=4, max_staleness=1)
    async with (
        learner(tmp_path, config) as running,
        FakeWorker(running.address).working() as worker,
    ):
        await asyncio.wait_for(running.task, 20)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert len(worker.receipts) >= 4 * 3 * 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["trajectories"]["trained"] == 4 * 3 * 2


@asynccontextmanager
async def attached(tmp_path: Path, **changes: Any) -> AsyncGenerator[FakeWorker]:
    """A worker that follows the policy and does nothing on its own."""
    async with learner(tmp_path, make_config(tmp_path, **changes)) as running:
        worker = FakeWorker(running.address)
        following = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 60)
        yield worker
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await worker.channel.close()


async def refusal_of(call: Awaitable[object]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = rpc.service_error(caught.value)
    assert error is not None
    return error.reason


async def must_lease(worker: FakeWorker, request_id: str = "") -> pb.Lease:
    lease = await worker.poll(request_id=request_id)
    assert lease is not None
    return lease


async def test_a_repeated_poll_gets_the_lease_it_got_before(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        first = await must_lease(worker, "one")
        assert (await must_lease(worker, "one")).lease_id == first.lease_id
        assert (await must_lease(worker, "two")).lease_id != first.lease_id


async def test_a_repeated_submission_is_free_and_other_content_is_refused(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        lease = await must_lease(worker)
        submission = graded(lease, lease.attempts[0], worker.policy, reward=1.0)
        assert not (await worker.submit(submission)).repeated_submission
        assert (await worker.submit(submission)).repeated_submission
        other = graded(lease, lease.attempts[0], worker.policy, reward=0.0)
        assert await refusal_of(worker.submit(other)) == "CONTENT_CONFLICT"


async def test_a_released_lease_is_lost_and_its_group_goes_to_the_next(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        lease = await must_lease(worker)
        await worker.submit(graded(lease, lease.attempts[1], worker.policy))
        release = pb.ReleaseLeasesRequest(worker_id="w0", lease_ids=[lease.lease_id])
        await worker.groups.ReleaseLeases(release)
        renew = pb.RenewLeasesRequest(worker_id="w0", lease_ids=[lease.lease_id])
        assert (await worker.groups.RenewLeases(renew)).lost_lease_ids == [lease.lease_id]
        late = graded(lease, lease.attempts[0], worker.policy)
        assert await refusal_of(worker.submit(late)) == "LEASE_LOST"
        again = await must_lease(worker)
        assert again.group_id == lease.group_id
        assert [attempt.attempt_index for attempt in again.attempts] == [0]


def _not_a_number(s: Submission) -> None:
    s.logprobs[0] = np.full(5, np.nan, dtype="<f4").tobytes()


def _positive(s: Submission) -> None:
    s.logprobs[0] = np.full(5, 0.1, dtype="<f4").tobytes()


def _too_few_logprobs(s: Submission) -> None:
    s.logprobs[0] = s.logprobs[0][:-4]


def _odd_bytes(s: Submission) -> None:
    s.logprobs[0] = s.logprobs[0][:-1]


def _foreign_token(s: Submission) -> None:
    s.token_ids[0] = np.full(8, 64, dtype="<i4").tobytes()


def _negative_token(s: Submission) -> None:
    s.token_ids[0] = np.full(8, -1, dtype="<i4").tobytes()


def _uncovered(s: Submission) -> None:
    s.header.sequences[0].spans.lengths[0] = 1


def _no_outcome(s: Submission) -> None:
    s.header.ClearField("reward")


def _infinite_reward(s: Submission) -> None:
    s.header.reward = float("inf")


def _no_stop(s: Submission) -> None:
    s.header.ClearField("stop_reason")


def _wrong_digest(s: Submission) -> None:
    s.digest = b"0" * 32


def _too_long(s: Submission) -> None:
    s.header.sequences[0].token_count = 129


def _policy_goes_back(s: Submission) -> None:
    spans = s.header.sequences[0].spans
    spans.writers.add().CopyFrom(spans.writers[0])
    spans.writers[0].policy.version = 1
    spans.writer_indexes[1] = 1


def _begins_with_the_policy(s: Submission) -> None:
    spans = s.header.sequences[0].spans
    spans.lengths[1] = 5
    del spans.authors[0], spans.lengths[0]
    s.logprobs[0] = np.full(7, -1.0, dtype="<f4").tobytes()


def _other_temperature(s: Submission) -> None:
    s.header.sequences[0].spans.writers[0].temperature = 0.0


def _partial_reward_is_no_number(s: Submission) -> None:
    s.header.partial_reward = float("nan")


def _reward_overflows_a_mean(s: Submission) -> None:
    s.header.reward = 1e308


def _partial_reward_overflows_a_mean(s: Submission) -> None:
    s.header.partial_reward = -1e7


def _named_reward_is_no_number(s: Submission) -> None:
    s.header.named_rewards["style"] = float("nan")


def _named_reward_without_a_name(s: Submission) -> None:
    s.header.named_rewards[""] = 1.0


def _named_reward_of_a_long_name(s: Submission) -> None:
    s.header.named_rewards["n" * 65] = 1.0


def _too_many_named_rewards(s: Submission) -> None:
    s.header.named_rewards.update({f"n{number}": 1.0 for number in range(33)})


def _attempt_out_of_bounds(s: Submission) -> None:
    s.header.key.attempt_index = 2


@pytest.mark.parametrize(
    "spoil",
    [
        *(_not_a_number, _positive, _too_few_logprobs, _odd_bytes, _foreign_token),
        *(_negative_token, _uncovered, _no_outcome, _infinite_reward, _no_stop, _wrong_digest),
        *(_too_long, _policy_goes_back, _attempt_out_of_bounds, _begins_with_the_policy),
        *(_other_temperature, _partial_reward_is_no_number),
        *(_reward_overflows_a_mean, _partial_reward_overflows_a_mean),
        *(_named_reward_is_no_number, _named_reward_without_a_name),
        *(_named_reward_of_a_long_name, _too_many_named_rewards),
    ],
    ids=lambda spoil: spoil.__name__.strip("_"),
)
async def test_a_malformed_trajectory_is_refused_and_changes_nothing(
    tmp_path: Path, spoil: Callable[[Submission], None]
) -> None:
    async with attached(tmp_path) as worker:
        lease = await must_lease(worker)
        submission = graded(lease, lease.attempts[0], worker.policy)
        spoil(submission)
        assert await refusal_of(worker.submit(submission)) == "MALFORMED_TRAJECTORY"
        good = await worker.submit(graded(lease, lease.attempts[0], worker.policy))
        assert not good.repeated_submission


async def test_a_policy_that_was_never_published_is_refused(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        lease = await must_lease(worker)
        future = policy_pb2.PolicyId(run_epoch=1, version=9)
        assert await refusal_of(worker.submit(graded(lease, lease.attempts[0], future))) == (
            "UNKNOWN_POLICY"
        )


async def test_a_second_learner_on_a_runs_folder_is_refused(tmp_path: Path) -> None:
    async with attached(tmp_path):
        with pytest.raises(JournalError, match="another learner works on"):
            open_journal(tmp_path / "run")


async def test_on_policy_runs_continue_when_groups_are_dropped(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=2, max_staleness=0, max_tries=1, max_requeues=0)
    async with learner(tmp_path, config) as running:
        worker = FakeWorker(running.address)
        following = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 60)
        for _ in range(3):
            lease = await must_lease(worker)
            for attempt in lease.attempts:
                await worker.submit(failed(lease, attempt, trajectory_pb2.FAILURE_KIND_ENV_LOST))
        work = asyncio.create_task(worker.persist(worker.work))
        await asyncio.wait_for(running.task, 10)
        for task in (following, work):
            task.cancel()
        await asyncio.gather(following, work, return_exceptions=True)
        await worker.channel.close()
    accounts = json.loads((tmp_path / "run" / "summary.json").read_text())["trajectories"]
    assert accounts["failed"] == 6
    assert accounts["acknowledged"] == sum(accounts.values()) - accounts["acknowledged"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["async/staleness_max"] for line in lines] == [0.0, 0.0]


async def test_evaluations_before_during_and_after_reach_the_summary(tmp_path: Path) -> None:
    heldout = write_tasks(tmp_path / "heldout.json", 6, prefix="heldout")
    sets = [
        {"name": "heldout", "tasks": str(heldout)},
        {"name": "greedy", "tasks": str(heldout), "temperature": 0.0, "when": ["before", "after"]},
    ]
    config = make_config(tmp_path, steps=4, eval={"every": 2, "sets": sets, "slots": 4})
    async with learner(tmp_path, config) as running, FakeWorker(running.address).working():
        await asyncio.wait_for(running.task, 20)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for moment in ("before", "after"):
        report = summary["eval"][moment]
        assert report["tasks"] == 6
        assert report["missing"] == 0
        assert report["ci95"][0] <= report["pass_at_1"] <= report["ci95"][1]
        assert set(report["by_env"]) == {"env0", "env1", "env2"}
        assert report["greedy_pass_at_1"] is not None
    assert summary["trajectories"]["evaluated"] == 6 * 5
