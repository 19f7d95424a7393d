"""Tasks that cannot be rendered: the whole group is dropped and reported; three end the run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.domain.attempts import AttemptKey, FailureKind, Purpose
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_common.wire.enums import FAILURE_KINDS
from flotilla_learner.alarms.event_rules import CALM_GROUPS, judge_spoiled
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.groups.counters import Tally
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.sampling.template_failures import TemplateFailures
from tests.learner.groups.test_group_endings import following_worker
from tests.learner.run.test_train_loop import eval_sets, following, lease_for, query
from tests.support.learner import FakeWorker, failed, graded, learner, make_config, write_tasks
from tests.support.waiting import until

UNRENDERED = trajectory_pb2.FAILURE_KIND_TEMPLATE_ERROR
MESSAGE = "the chat template cannot render user, assistant, tool: roles must alternate"
# Nothing here renews its leases, so that they last.
GROUPS = {"lease_ttl_s": 300, "group_size": 4, "groups_per_step": 4, "max_staleness": 0}


async def spoil(
    worker: FakeWorker,
    lease: pb.Lease,
    *,
    after: int = 2,
    kind: trajectory_pb2.FailureKind.ValueType = UNRENDERED,
) -> None:
    """The first attempts are graded, then one cannot be rendered, or is refused."""
    for attempt in lease.attempts[:after]:
        await worker.submit(graded(lease, attempt, worker.policy))
    submission = failed(lease, lease.attempts[after], kind)
    submission.header.detail = MESSAGE
    receipt = await worker.submit(submission)
    assert receipt.group_complete, "the others of its group need not continue"


def alarms_in(tmp_path: Path) -> list[dict[str, Any]]:
    """Each as it was raised, or cleared."""
    path = tmp_path / "run" / "alarms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def template_alarms(tmp_path: Path) -> list[dict[str, Any]]:
    return [each for each in alarms_in(tmp_path) if each["alarm"] == "template_error"]


def check_balance(tmp_path: Path, **fates: int) -> None:
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        found = audit_journal(db)
    assert found.holds
    assert found.fates == {name.replace("__", "/"): count for name, count in fates.items()}


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind.spoils_group])
async def test_no_attempt_of_a_group_that_one_spoils_is_used(
    tmp_path: Path, kind: FailureKind
) -> None:
    async with following(tmp_path, steps=9, **GROUPS) as worker:
        lease = await lease_for(worker, pb.PURPOSE_TRAIN)
        await spoil(worker, lease, kind=FAILURE_KINDS.encode(kind))
        await until(lambda: [each["alarm"] for each in alarms_in(tmp_path)] == [kind])
        late = graded(lease, lease.attempts[3], worker.policy)
        with pytest.raises(grpc.aio.AioRpcError, match="has no lease"):
            await worker.submit(late)
        again = await lease_for(worker, pb.PURPOSE_TRAIN)
        assert again.group_id.endswith("r0"), "the task is not tried again at once"
    rows = query(tmp_path, "SELECT state, reason FROM groups WHERE state = 'dropped'")
    assert rows == [("dropped", kind)]
    check_balance(tmp_path, failed=1, **{f"dropped__{kind}": 2})


async def test_a_try_that_cannot_be_rendered_drops_its_group_after_a_kill_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner is gone between the try's row in the journal and the end of its group."""
    taken = "flotilla_learner.groups.group_endings.GroupEndings.take_record"
    with monkeypatch.context() as patch:
        patch.setattr(taken, lambda *_: None)
        async with following(tmp_path, steps=9, **GROUPS) as worker:
            lease = await lease_for(worker, pb.PURPOSE_TRAIN)
            for attempt in lease.attempts[:3]:
                await worker.submit(graded(lease, attempt, worker.policy))
            await worker.submit(failed(lease, lease.attempts[3], UNRENDERED))
    assert query(tmp_path, "SELECT DISTINCT state FROM groups") == [("open",)]
    async with following(tmp_path, steps=9, **GROUPS) as worker:
        other = await lease_for(worker, pb.PURPOSE_TRAIN)
        assert other.group_id != lease.group_id
    check_balance(tmp_path, failed=1, dropped__template_error=3)


async def test_an_evaluation_reports_a_task_that_cannot_be_rendered_as_missing(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, eval=eval_sets(tmp_path), mode="eval", lease_ttl_s=300)
    async with learner(tmp_path, config) as running:
        worker, attached = await following_worker(running.address)
        spoiled = await lease_for(worker, pb.PURPOSE_EVAL)
        await spoil(worker, spoiled, after=0)
        playing = asyncio.create_task(worker.persist(worker.work))
        await asyncio.wait_for(running.task, 30)
        playing.cancel()
        await asyncio.gather(attached, playing, return_exceptions=True)
        await worker.channel.close()
    report = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]["eval_only"]
    assert (report["tasks"], report["missing"]) == (3, 1)


async def ends(tmp_path: Path, tasks: int, spoiled: list[bool], *, wait_s: float) -> str:
    """Return how the learner ends when groups of different tasks, as long as there are some, are
    spoiled or played well."""
    path = write_tasks(tmp_path / "these.json", tasks, envs=1)
    changes: dict[str, Any] = {**GROUPS, "groups_per_step": 20, "tasks": str(path)}
    try:
        async with learner(tmp_path, make_config(tmp_path, steps=9, **changes)) as running:
            worker, attached = await following_worker(running.address)
            for bad in spoiled:
                lease = await lease_for(worker, pb.PURPOSE_TRAIN)
                await (spoil(worker, lease) if bad else worker.play(lease))
            await asyncio.wait([running.task], timeout=wait_s)
            attached.cancel()
            await worker.channel.close()
    except ConfigError as error:
        return str(error)
    return ""


async def test_three_groups_of_different_tasks_end_the_run_with_that_reason(
    tmp_path: Path,
) -> None:
    message = await ends(tmp_path, 12, [True, False, True, False, True], wait_s=10)
    assert message.startswith("rollout: the policy's input cannot be rendered")
    assert MESSAGE in message
    assert 'rollout.dialect.name = "full"' in message
    check_balance(tmp_path, failed=3, dropped__template_error=6, queued=8)


async def test_two_groups_raise_an_alarm_which_ends_after_groups_without_one(
    tmp_path: Path,
) -> None:
    path = write_tasks(tmp_path / "these.json", 40, envs=1)
    changes: dict[str, Any] = {**GROUPS, "groups_per_step": 40, "tasks": str(path)}
    async with learner(tmp_path, make_config(tmp_path, steps=9, **changes)) as running:
        worker, attached = await following_worker(running.address)
        for spoiled in (1, 1, *[0] * CALM_GROUPS):
            lease = await lease_for(worker, pb.PURPOSE_TRAIN)
            await (spoil(worker, lease) if spoiled else worker.play(lease))
            if spoiled:
                await until(lambda: len(template_alarms(tmp_path)) == 1)
        await until(lambda: len(template_alarms(tmp_path)) == 2)
        attached.cancel()
        await worker.channel.close()
    raised, cleared = template_alarms(tmp_path)
    assert (raised["state"], cleared["state"]) == ("raised", "cleared")
    assert MESSAGE in raised["cause"]
    assert raised["scope"] == cleared["scope"] == "env0"


@pytest.mark.parametrize(("groups", "bad"), [(0, True), (1, None), (15, None), (16, False)])
def test_groups_without_a_template_error_count_for_their_environment_alone(
    groups: int, bad: bool | None
) -> None:
    tally = Tally()
    for env in ("env0", "env1"):
        spec = GroupSpec("g", 0, Task("t", env, "{}"), Purpose.TRAIN, 4, 1.0)
        spoiling = Trajectory(
            AttemptKey("g", 0, 0), "", (), b"", failure=FailureKind.TEMPLATE_ERROR, detail=MESSAGE
        )
        tally.count_spoiled(spec, spoiling)
    for _ in range(groups):
        tally.count_sound("env0")
    verdicts = [judge_spoiled(*key, found) for key, found in tally.spoiled.items()]
    found = {verdict.scope: verdict.bad for verdict in verdicts}
    assert found == {"env0": bad, "env1": True}


def test_one_hostile_task_does_not_end_the_run() -> None:
    unrendered = TemplateFailures(tasks=12)
    assert not any(unrendered.note_dropped("hostile", MESSAGE) for _ in range(50))
    assert not unrendered.note_dropped("second", MESSAGE)
    assert "3 different tasks" in unrendered.note_dropped("third", MESSAGE)


def test_a_run_of_one_task_ends_when_nothing_else_happens() -> None:
    unrendered = TemplateFailures(tasks=1)
    for _ in range(9):
        assert not unrendered.note_dropped("only", MESSAGE)
        assert not unrendered.note_dropped("only", MESSAGE)
        unrendered.note_complete()
    assert not unrendered.note_dropped("only", MESSAGE)
    assert not unrendered.note_dropped("only", MESSAGE)
    assert "1 different task" in unrendered.note_dropped("only", MESSAGE)
