"""Work that is not trained on: why, what becomes of its task, and where it is counted."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import policy_pb2, trajectory_pb2
from flotilla_common.domain.policy import PolicyId
from flotilla_learner.groups.group_endings import GroupEndings
from flotilla_learner.groups.policy_history import PolicyLineage, PolicyStanding
from flotilla_learner.journal.store import open_journal
from tests.learner.run.test_train_loop import following, lease_for, query, rows_of, run_to_the_end
from tests.support.learner import FakeWorker, failed, graded, learner, make_config

LOST = trajectory_pb2.FAILURE_KIND_ENV_LOST


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


def test_a_policy_survives_while_every_later_epoch_began_at_or_after_it() -> None:
    published = [PolicyId(1, v, bytes([v])) for v in range(4)] + [PolicyId(2, 3, b"x")]
    lineage = PolicyLineage(published, {1: 0, 2: 2, 3: 3})
    assert lineage.standing_of(PolicyId(1, 2, b"\2")) is PolicyStanding.SURVIVING
    assert lineage.standing_of(PolicyId(1, 3, b"\3")) is PolicyStanding.ORPHANED
    assert lineage.standing_of(PolicyId(2, 3, b"x")) is PolicyStanding.SURVIVING
    assert lineage.standing_of(PolicyId(2, 3, b"y")) is PolicyStanding.UNKNOWN
    assert lineage.standing_of(PolicyId(2, 3)) is PolicyStanding.UNKNOWN
    assert lineage.standing_of(PolicyId(4, 0, b"x")) is PolicyStanding.UNKNOWN


async def test_what_an_orphaned_policy_wrote_is_kept_and_not_trained_on(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "run")
    await journal.begin_epoch(at_least=1)
    await journal.add_publication(PolicyId(1, 3, b"f" * 32))
    await journal.close()
    orphaned = policy_pb2.PolicyId(run_epoch=1, version=3, fingerprint=b"f" * 32)
    async with following(tmp_path) as worker:
        lease = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.submit(graded(lease, lease.attempts[0], orphaned))
        again = await worker.submit(graded(lease, lease.attempts[1], worker.policy))
        assert not again.group_complete, "the orphaned attempt is still missing"
    assert query(tmp_path, "SELECT dropped FROM trajectories ORDER BY attempt_index") == [
        ("orphan_policy",),
        ("",),
    ]


async def test_a_task_comes_back_as_often_as_it_may_and_is_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"groups_per_step": 1, "max_staleness": 0, "max_tries": 1, "max_requeues": 2}
    names: list[str] = []
    log = Mock()
    monkeypatch.setattr("flotilla_learner.groups.counters._log", log)
    async with following(tmp_path, steps=1, **changes) as worker:
        for _ in range(4):
            lease = await lease_for(worker, pb.PURPOSE_TRAIN)
            names.append(lease.group_id)
            for attempt in lease.attempts:
                await worker.submit(failed(lease, attempt, LOST))
    assert names == ["g000000r0", "g000000r1", "g000000r2", "g000001r0"]
    message = [call.args[0] for call in log.error.call_args_list]
    assert message == ["a task was given up"]
    reasons = query(tmp_path, "SELECT DISTINCT reason FROM groups WHERE state = 'dropped'")
    assert reasons == [("too_few_graded",)]


async def test_a_group_with_min_group_graded_attempts_is_trained_on(tmp_path: Path) -> None:
    changes = {"group_size": 3, "min_group": 2, "max_tries": 1, "groups_per_step": 1}
    async with learner(tmp_path, make_config(tmp_path, steps=1, **changes)) as running:
        worker, attached = await following_worker(running.address)
        lease = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.submit(graded(lease, lease.attempts[0], worker.policy))
        await worker.submit(failed(lease, lease.attempts[1], LOST))
        done = await worker.submit(graded(lease, lease.attempts[2], worker.policy))
        assert done.group_complete
        await asyncio.wait_for(running.task, 10)
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()
    assert summary(tmp_path)["trajectories"] == {"trained": 2, "failed": 1, "acknowledged": 3}


async def test_groups_that_got_too_stale_are_dropped_and_counted(tmp_path: Path) -> None:
    changes = {"groups_per_step": 1, "max_staleness": 1, "steps": 4}
    async with learner(tmp_path, make_config(tmp_path, **changes)) as running:
        worker, attached = await following_worker(running.address)
        first = policy_pb2.PolicyId()
        first.CopyFrom(worker.policy)
        slow = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.submit(graded(slow, slow.attempts[0], first))
        for step in (1, 2):
            lease = await lease_for(worker, pb.PURPOSE_TRAIN)
            await worker.play(lease)
            await rows_of(tmp_path, f"SELECT * FROM publications WHERE version = {step}")
            async with asyncio.timeout(10):
                await caught_up(worker, step)
        await rows_of(tmp_path, "SELECT * FROM groups WHERE reason = 'stale'")
        work = asyncio.create_task(worker.persist(worker.work))
        await asyncio.wait_for(running.task, 10)
        work.cancel()
        await asyncio.gather(attached, work, return_exceptions=True)
        await worker.channel.close()
    assert summary(tmp_path)["trajectories"]["dropped/stale"] == 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["async/dropped_stale"] for line in lines) == 1
    assert max(json.loads(line)["async/staleness_max"] for line in lines) <= 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_group_whose_attempts_saw_different_tools_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """If `restarted`, the learner is gone between the last try's row in the journal and the end of
    its group."""
    changes = {"lease_ttl_s": 300, "group_size": 4, "groups_per_step": 4, "max_staleness": 0}

    def offered(lease: pb.Lease, attempt: int, worker: FakeWorker, tools: bytes) -> Any:
        one = graded(lease, lease.attempts[attempt], worker.policy)
        one.header.tool_schema_digest = tools * 32
        return one

    with monkeypatch.context() as patch:
        if restarted:
            patch.setattr(f"{GroupEndings.__module__}.GroupEndings.take_record", lambda *_: None)
        async with following(tmp_path, steps=9, **changes) as worker:
            lease = await lease_for(worker, pb.PURPOSE_TRAIN)
            lost = failed(lease, lease.attempts[0], LOST)
            lost.header.tool_schema_digest = b"3" * 32
            await worker.submit(lost)
            for attempt, tools in ((1, b"1"), (2, b"1"), (3, b"2")):
                ended = (await worker.submit(offered(lease, attempt, worker, tools))).group_complete
                assert ended == (tools == b"2" and not restarted)
    if restarted:
        async with following(tmp_path, steps=9, **changes) as worker:
            other = await lease_for(worker, pb.PURPOSE_TRAIN)
            assert other.group_id != lease.group_id
    rows = query(tmp_path, "SELECT state, reason FROM groups WHERE state = 'dropped'")
    assert rows == [("dropped", "tools_changed")]


async def test_constant_groups_are_dropped_when_the_spec_has_it(tmp_path: Path) -> None:
    result = await run_to_the_end(tmp_path, steps=4, constant_groups="drop", group_size=2)
    fates = result["trajectories"]
    assert fates["dropped/constant"] + fates["trained"] == 4 * 3 * 2
    states = query(tmp_path, "SELECT DISTINCT state FROM groups WHERE reason = 'constant'")
    assert states == [("filtered",)]


async def test_a_capability_that_no_worker_has_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"key": "s", "prompt": "look", "env_id": "e", "task_modality": "computer_use"}]
    (tmp_path / "screens.json").write_text(json.dumps(tasks))
    screens = str(tmp_path / "screens.json")
    async with following(tmp_path, sees_pictures=True, tasks=screens, lease_ttl_s=0.4) as worker:
        polling = asyncio.create_task(worker.poll())
        await asyncio.sleep(1.0)
        assert not polling.done()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    out, err = capfd.readouterr()
    assert (out + err).count("tasks wait for a capability that no rollout worker has") == 1


async def following_worker(address: str) -> tuple[FakeWorker, asyncio.Task[None]]:
    worker = FakeWorker(address)
    attached = asyncio.create_task(worker.attach())
    await asyncio.wait_for(worker.updated.wait(), 10)
    return worker, attached


async def caught_up(worker: FakeWorker, version: int) -> None:
    while worker.policy.version < version:
        worker.updated.clear()
        await worker.updated.wait()
