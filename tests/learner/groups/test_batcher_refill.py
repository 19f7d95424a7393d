"""Dynamic sampling: groups without signal make room at once, and a step waits for others."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import policy_pb2
from flotilla_learner.groups.batcher import Batcher
from flotilla_learner.types import StepResult, TrainBatch
from tests.learner.groups.test_batcher import ready
from tests.learner.groups.test_group_endings import caught_up, following_worker, summary
from tests.learner.run.test_train_loop import following, lease_for, query, rows_of, run_to_the_end
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, graded, learner, make_config

# Nothing here renews its leases.
LONG = {"lease_ttl_s": 300.0}
REPLACE = {**LONG, "constant_groups": "replace", "groups_per_step": 2, "max_staleness": 0}


def replacing(max_refill: int = 2) -> Batcher:
    return Batcher(
        groups_per_step=2, max_staleness=0, without_signal="replace", max_refill=max_refill
    )


def test_a_step_waits_for_groups_with_signal_and_counts_those_without() -> None:
    batcher = replacing()
    assert batcher.add_group(ready(0, [1, 1]))
    assert not batcher.add_group(ready(1, [0, 1]))
    assert batcher.add_group(ready(2, [0, 0]))
    assert batcher.take_batch(0) is None
    assert not batcher.add_group(ready(3, [0, 1]))
    batch = batcher.take_batch(0)
    assert batch is not None
    assert [group.spec.sequence_number for group in batch.groups] == [1, 3]
    assert [group.spec.sequence_number for group in batch.filtered] == [0, 2]
    assert (batch.replaced, batch.places_without_signal) == (2, 0)


def test_when_the_refill_is_used_up_a_step_proceeds_with_what_there_is() -> None:
    batcher = replacing(max_refill=1)
    assert [batcher.add_group(ready(n, [1, 1])) for n in range(3)] == [True, True, False]
    assert batcher.take_batch(0) is None
    assert not batcher.add_group(ready(3, [0, 1]))
    batch = batcher.take_batch(0)
    assert batch is not None
    assert [group.spec.sequence_number for group in batch.groups] == [3]
    assert len(batch.filtered) == 3
    assert (batch.replaced, batch.places_without_signal) == (2, 1)
    assert batcher.add_group(ready(4, [1, 1])), "the next step has a refill of its own"


def test_without_any_signal_a_step_trains_on_constant_groups() -> None:
    batcher = replacing(max_refill=1)
    for number in range(4):
        batcher.add_group(ready(number, [1, 1]))
    batch = batcher.take_batch(0)
    assert batch is not None
    assert len(batch.groups) == len(batch.filtered) == 2
    assert batch.places_without_signal == 2


def test_a_batch_that_is_put_back_can_be_taken_again_without_what_is_damaged() -> None:
    batcher = replacing()
    for number, rewards in enumerate([[1, 1], [0, 1], [0, 1]]):
        batcher.add_group(ready(number, [float(r) for r in rewards]))
    batch = batcher.take_batch(0)
    assert batch is not None
    batcher.put_back(batch, without={"g1r0"})
    assert batcher.take_batch(0) is None
    batcher.add_group(ready(3, [0, 1]))
    again = batcher.take_batch(0)
    assert again is not None
    assert [group.spec.sequence_number for group in again.groups] == [2, 3]
    assert (again.filtered, again.replaced) == (batch.filtered, 1)


def test_what_was_replaced_gets_too_old_to_be_counted_like_all_else() -> None:
    batcher = replacing()
    batcher.add_group(ready(0, [1, 1], oldest=0))
    for number in (1, 2):
        batcher.add_group(ready(number, [0, 1], oldest=1))
    batch = batcher.take_batch(1)
    assert batch is not None
    assert batch.filtered == ()
    assert [group.spec.sequence_number for group in batcher.drop_stale(1)] == [0]
    assert batcher.drop_stale(1) == []


def test_signal_is_in_the_rewards_of_graded_attempts_alone() -> None:
    """Not in tokens, attempts that failed, or partial rewards."""
    group = ready(0, [0.5, 0.5])
    assert not group.has_signal
    assert ready(1, [0.5, 0.25]).has_signal


async def play(worker: FakeWorker, rewards: Sequence[float]) -> str:
    lease = await lease_for(worker, pb.PURPOSE_TRAIN)
    for attempt, reward in zip(lease.attempts, rewards, strict=True):
        await worker.submit(graded(lease, attempt, worker.policy, reward=reward))
    return lease.group_id


async def test_on_policy_a_group_without_signal_frees_its_slot_before_the_step(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, steps=1, **REPLACE) as worker:
        names = [await play(worker, rewards) for rewards in ([1, 1], [0, 0], [1, 1], [0, 1])]
        assert names == [f"g{n:06d}r0" for n in range(4)]
        states = "SELECT state, step FROM groups WHERE state = 'filtered'"
        assert query(tmp_path, states) == [("filtered", None)] * 3
        assert query(tmp_path, "SELECT * FROM plans") == []


async def test_what_was_replaced_is_counted_with_its_step_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, steps=1, **REPLACE) as worker:
        for rewards in ([1, 1], [0, 0], [0, 1]):
            await play(worker, rewards)
    async with learner(tmp_path, make_config(tmp_path, steps=1, **REPLACE)) as running:
        worker, attached = await following_worker(running.address)
        await play(worker, [1, 0])
        await running.task
        attached.cancel()
        await worker.channel.close()
    assert summary(tmp_path)["trajectories"] == {
        "trained": 4,
        "dropped/constant": 4,
        "acknowledged": 8,
    }
    states = Counter(query(tmp_path, "SELECT state, step FROM groups"))
    assert states == {("planned", 1): 2, ("filtered", 1): 2}
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["sampling/replaced_groups"] == 2
    assert metrics["reward/avg_raw_reward"] == 0.5
    assert metrics["reward/variance_per_prompt"] == 0.125


class GatedRanks(FakeRanks):
    """Train the second step when they are let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go_on = asyncio.Event()

    async def train_step(self, batch: TrainBatch) -> StepResult:
        if batch.step == 2:
            await self.go_on.wait()
        return await super().train_step(batch)


async def test_a_group_that_is_replaced_while_a_step_is_trained_may_be_too_old_for_the_next(
    tmp_path: Path,
) -> None:
    """Staleness is bounded for what a step counts, too (I7)."""
    changes = {**REPLACE, "groups_per_step": 1, "max_staleness": 1}
    ranks = GatedRanks(tmp_path / "weights")
    async with learner(tmp_path, make_config(tmp_path, steps=3, **changes), ranks) as running:
        worker, attached = await following_worker(running.address)
        slow = await lease_for(worker, pb.PURPOSE_TRAIN)
        oldest = policy_pb2.PolicyId()
        oldest.CopyFrom(worker.policy)
        await worker.submit(graded(slow, slow.attempts[0], oldest, reward=1.0))
        await play(worker, [0, 1])
        await caught_up(worker, 1)
        await play(worker, [0, 1])
        await rows_of(tmp_path, "SELECT * FROM plans WHERE step = 2")
        await worker.submit(graded(slow, slow.attempts[1], oldest, reward=1.0))
        ranks.go_on.set()
        await caught_up(worker, 2)
        await play(worker, [0, 1])
        await running.task
        attached.cancel()
        await worker.channel.close()
    assert query(tmp_path, "SELECT reason FROM groups WHERE state = 'dropped'") == [("stale",)]
    assert summary(tmp_path)["trajectories"]["dropped/stale"] == 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["async/staleness_max"] for line in lines) <= 1


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_whole_runs_with_replacement_end_and_lose_nothing(
    tmp_path: Path, max_staleness: int
) -> None:
    changes: dict[str, Any] = {**LONG, "constant_groups": "replace", "max_staleness": max_staleness}
    fates = (await run_to_the_end(tmp_path, max_refill=40, **changes))["trajectories"]
    assert fates["trained"] == 3 * 3 * 2
    assert sum(n for fate, n in fates.items() if fate != "acknowledged") == fates["acknowledged"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert [metrics["sampling/lacking_groups"] for metrics in logged] == [0] * 3
    assert max(metrics["async/staleness_max"] for metrics in logged) <= max_staleness


async def test_a_step_that_proceeds_short_logs_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with learner(
        tmp_path, make_config(tmp_path, steps=1, max_refill=1, **REPLACE)
    ) as running:
        worker, attached = await following_worker(running.address)
        for rewards in ([1, 1], [0, 0], [1, 1], [0, 1]):
            await play(worker, rewards)
        await running.task
        attached.cancel()
        await worker.channel.close()
    out, err = capfd.readouterr()
    assert "a step trains on fewer groups with signal than groups_per_step" in out + err
    assert summary(tmp_path)["trajectories"]["trained"] == 2
