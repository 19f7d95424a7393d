"""Tasks that cannot be graded: who is at fault, and what becomes of them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.rpc.errors import ConfigError
from tests.learner.groups.test_group_endings import following_worker
from tests.learner.run.test_train_loop import following, query
from tests.support.learner import FakeWorker, failed, graded, learner, make_config

LOST = trajectory_pb2.FAILURE_KIND_ENV_LOST
# Nothing here renews its leases, so that they last.
ONCE = {
    "lease_ttl_s": 300,
    "max_tries": 1,
    "max_requeues": 0,
    "max_staleness": 0,
    "groups_per_step": 4,
}
UNKNOWN = "UNKNOWN_ENVIRONMENT: backend 'fleet' has no environment 'env0'"


def write(tmp_path: Path, sizes: dict[str, int]) -> str:
    rows = [
        {"key": f"{env}-{n}", "prompt": "do", "env_id": env}
        for env, size in sizes.items()
        for n in range(size)
    ]
    path = tmp_path / "these.json"
    path.write_text(json.dumps(rows))
    return str(path)


async def lease_one(worker: FakeWorker) -> tuple[pb.Lease, str]:
    lease = await worker.poll()
    assert lease is not None
    return lease, json.loads(lease.task_json)["key"]


async def fail(worker: FakeWorker, lease: pb.Lease, detail: str = "") -> None:
    for attempt in lease.attempts:
        submission = failed(lease, attempt, LOST)
        submission.header.detail = detail
        await worker.submit(submission)


async def win(worker: FakeWorker, lease: pb.Lease) -> None:
    for attempt in lease.attempts:
        await worker.submit(graded(lease, attempt, worker.policy))


def events(tmp_path: Path) -> list[Any]:
    return query(tmp_path, "SELECT task, kind FROM curriculum_events ORDER BY id")


async def test_a_task_that_fails_while_others_are_graded_is_quarantined_for_good(
    tmp_path: Path,
) -> None:
    tasks = write(tmp_path, {"env0": 5})
    async with following(tmp_path, steps=9, tasks=tasks, **ONCE) as worker:
        bad, bad_key = await lease_one(worker)
        other, _ = await lease_one(worker)
        await win(worker, other)
        await fail(worker, bad)
        assert events(tmp_path) == [(bad_key, "quarantined")]
    drawn: list[str] = []
    async with following(tmp_path, steps=9, tasks=tasks, **ONCE) as worker:
        while len(drawn) < 16:
            lease, key = await lease_one(worker)
            await win(worker, lease)
            drawn.append(key)
    assert bad_key not in drawn[1:], "the group that was leased before may end"
    assert set(drawn) == {f"env0-{n}" for n in range(5)} - {bad_key}


async def test_a_witness_that_is_graded_later_counts_when_it_was_at_work_in_the_meantime(
    tmp_path: Path,
) -> None:
    tasks = write(tmp_path, {"env0": 5})
    async with following(tmp_path, steps=9, tasks=tasks, **ONCE) as worker:
        bad, bad_key = await lease_one(worker)
        slow, _ = await lease_one(worker)
        await fail(worker, bad)
        assert events(tmp_path) == []
        for attempt in slow.attempts:
            submission = graded(slow, attempt, worker.policy)
            submission.header.counts.open_s = 5.0
            await worker.submit(submission)
        assert events(tmp_path) == [(bad_key, "quarantined")]


async def test_an_outage_quarantines_nothing(tmp_path: Path) -> None:
    """Everything fails, then everything works: no task is to blame."""
    tasks = write(tmp_path, {"env0": 5})
    async with following(tmp_path, steps=9, tasks=tasks, **ONCE) as worker:
        for _ in range(7):
            lease, _ = await lease_one(worker)
            await fail(worker, lease)
        await asyncio.sleep(0.05)
        for _ in range(4):
            lease, _ = await lease_one(worker)
            await win(worker, lease)
        await lease_one(worker)
        assert events(tmp_path) == []


async def test_an_environment_is_not_emptied_by_quarantine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = write(tmp_path, {"env0": 3})
    async with following(tmp_path, steps=9, tasks=tasks, **ONCE) as worker:
        leases = [await lease_one(worker) for _ in range(3)]
        await win(worker, leases[0][0])
        for lease, _ in leases[1:]:
            await fail(worker, lease)
        kinds = [kind for _, kind in events(tmp_path)]
        assert kinds == ["quarantined", "quarantine_refused"]
    out, err = capfd.readouterr()
    assert "too many of its environment already are" in out + err


async def test_a_task_that_the_gateway_refuses_is_not_tried_again(tmp_path: Path) -> None:
    tasks = write(tmp_path, {"env0": 30})
    changes = {**ONCE, "max_requeues": 5}
    async with following(tmp_path, steps=9, tasks=tasks, **changes) as worker:
        bad, bad_key = await lease_one(worker)
        await fail(worker, bad, "BAD_TASK: task_modality 'x' is none of tool_use, computer_use")
        assert events(tmp_path) == [(bad_key, "quarantined")]
        _, key = await lease_one(worker)
        assert key != bad_key


async def outcome(tmp_path: Path, details: list[str], *, ends: bool = True, **changes: Any) -> str:
    """Return how the learner ends when groups fail with these details, "" standing for a good
    group."""
    config = make_config(
        tmp_path,
        tasks=write(tmp_path, {"env0": 500}),
        steps=9,
        **{**ONCE, **changes},
    )
    try:
        async with learner(tmp_path, config) as running:
            worker, attached = await following_worker(running.address)
            for detail in details:
                lease, _ = await lease_one(worker)
                await (fail(worker, lease, detail) if detail else win(worker, lease))
            await asyncio.wait([running.task], timeout=60 if ends else 1.3)
            attached.cancel()
            await worker.channel.close()
    except ConfigError as error:
        return str(error)
    return ""


async def test_an_environment_that_is_not_served_ends_the_run_and_names_the_backend(
    tmp_path: Path,
) -> None:
    message = await outcome(tmp_path, [UNKNOWN])
    assert "nothing serves environment 'env0'" in message
    assert "no episode of it was ever opened in this run" in message
    assert "backend 'fleet'" in message


async def test_an_environment_that_was_served_before_does_not_end_the_run(tmp_path: Path) -> None:
    assert await outcome(tmp_path, ["", UNKNOWN, UNKNOWN], ends=False) == ""


async def test_other_failures_do_not_end_the_run(tmp_path: Path) -> None:
    assert await outcome(tmp_path, ["UNAVAILABLE: away"] * 12, ends=False) == ""


async def test_an_environment_all_of_whose_tasks_are_refused_ends_the_run(tmp_path: Path) -> None:
    bad = "BAD_TASK: env_id 'a b' must be letters"
    assert await outcome(tmp_path, [bad] * 7, ends=False, groups_per_step=20) == ""
    (tmp_path / "again").mkdir()
    message = await outcome(tmp_path / "again", [bad] * 8, groups_per_step=20)
    assert "refuses the tasks of environment 'env0'" in message
    assert bad in message


DOWN = "connect: http://127.0.0.1:{}/mcp cannot be reached: Connection refused"


async def test_a_run_of_which_everything_fails_for_one_reason_ends_with_it(tmp_path: Path) -> None:
    message = await outcome(tmp_path, [DOWN.format(port) for port in (8001, 8002, 8003)])
    assert "no attempt of this run was ever graded, and all tries at 3 tasks" in message
    assert f"failed for the same reason: env_lost: {DOWN.format(8003)}" in message


@pytest.mark.parametrize(
    "details",
    [
        ["", *[DOWN] * 6],
        [DOWN, "timeout: no answer", DOWN, "timeout: no answer", DOWN],
        [DOWN, DOWN],
    ],
    ids=["something was graded", "several reasons", "too few tasks"],
)
async def test_a_run_that_may_still_work_continues(tmp_path: Path, details: list[str]) -> None:
    assert await outcome(tmp_path, details, ends=False, groups_per_step=20) == ""


async def test_a_step_shows_what_was_given_up(tmp_path: Path) -> None:
    changes = {**ONCE, "groups_per_step": 1, "tasks": write(tmp_path, {"env0": 50})}
    async with learner(tmp_path, make_config(tmp_path, steps=1, **changes)) as running:
        worker, attached = await following_worker(running.address)
        bad, _ = await lease_one(worker)
        await fail(worker, bad, "BAD_TASK: no prompt")
        good, _ = await lease_one(worker)
        await win(worker, good)
        await asyncio.wait_for(running.task, 60)
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()
    assert query(tmp_path, "SELECT max(number) FROM curriculum") == [(2,)]
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["sampling/quarantined"] == 1
    assert metrics["sampling/env0/quarantined_tasks"] == 1
    assert metrics["sampling/env0/share"] == 1
    assert metrics["sampling/distinct_tasks"] == 2
    assert metrics["failures/quarantined_tasks"] == 1
